"""The reward service scores each item on its own, types every result, and neither loses nor invents one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.config import load_experiment
from headway.runtime.rewards import RewardClient
from headway.runtime.service import Placement
from headway.workflow.errors import RewardFailed, RewardTimeout
from services.reward.app import run


def experiment(folder: Path, reward: str) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(f"experiment_name: e\ntrial_name: t\nreward: {{{reward}}}\n")
    return path


@pytest.fixture
async def rewards(tmp_path: Path) -> AsyncIterator[RewardClient]:
    config = load_experiment(experiment(tmp_path, "function: exact, timeout_s: 1.0, num_workers: 2"))
    async with run(config, Placement(run_dir=tmp_path)) as running, RewardClient(timeout_s=1.0) as client:
        client.set_addresses([f"127.0.0.1:{running.ports['grpc']}"])
        yield client


async def test_each_completion_of_a_batch_gets_its_own_reward(rewards: RewardClient) -> None:
    asked = [rewards.score(str(number % 7), data={"answer": "3"}) for number in range(700)]
    assert await asyncio.gather(*asked) == [float(number % 7 == 3) for number in range(700)]
