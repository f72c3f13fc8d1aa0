"""Trainer and rollout controller keep each other's work: whichever of them dies, every group is trained on once.

Real name-resolve, reward service, controller with its journal, and a scripted engine over HTTP; the trainer is a
process of its own and dies by SIGKILL.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from trainer_harness import BATCH, Zygote, merged, settings, zygote

from headway.config import ExperimentConfig, load_experiment
from headway.core.version import PolicyVersion
from headway.runtime.names import NameClient
from headway.runtime.service import Placement
from headway.testing.scripted_engine import ScriptedEngine
from services.name_resolve import app as name_resolve
from services.reward import app as reward
from services.rollout_controller import app as rollout_controller

STEPS = 6
DEADLINE_S = 100.0
CHANGES = {
    "recover": {"mode": "auto", "freq_steps": 3, "freq_secs": None, "freq_epochs": None},
    "reward": {"function": "length", "num_workers": 1},
    "rollout": {"max_concurrent_rollouts": 8},
}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class World:
    """Everything but the trainer."""

    config: ExperimentConfig
    config_file: Path
    name_resolve: str
    names: NameClient
    placement: Placement

    async def ask(self, path: str) -> Any:
        metadata = (await self.names.get("services/rollout-controller/0")).metadata
        async with aiohttp.ClientSession() as session, session.get(f"http://{metadata['http']}{path}") as reply:
            return await reply.json()

    async def until_step(self, step: int) -> None:
        async for record in self.names.watch_versions():
            if record.version.step >= step:
                return

    def stats(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in (self.config.paths.logs / "stats.jsonl").read_bytes().splitlines()]


@asynccontextmanager
async def world(folder: Path, **changes: Any) -> AsyncIterator[World]:
    file = folder / "experiment.yaml"
    file.write_text(json.dumps(merged(merged(settings(folder, STEPS), CHANGES), changes)))
    config = load_experiment(file)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        resolver = await enter(name_resolve.run(config, Placement()))
        placement = Placement(f"127.0.0.1:{resolver.ports['grpc']}", run_dir=folder)
        rewards = await enter(reward.run(config, placement))
        names = await enter(NameClient(placement.name_resolve, config.run_name))
        await names.register("services/reward/0", f"127.0.0.1:{rewards.ports['grpc']}")
        engine = await enter(ScriptedEngine(label="v0.0", tokens_per_s=float("inf")))
        await names.register("services/inference/0", engine.url, metadata={"engine": "sglang"})
        yield World(config, file, placement.name_resolve, names, placement)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Zygote]:
    async with zygote(tmp_path_factory.mktemp("zygote") / "trainers.log") as made:
        yield made


async def conserved(here: World, consumed: int) -> None:
    """Every task is accounted for, and nothing is left over."""
    status = await here.ask("/v1/status")
    tasks = status["tasks"]
    assert tasks["is_conserved"]
    assert tasks["consumed"] == consumed
    assert tasks["running"] == tasks["ready"] == tasks["leased"] == 0


@pytest.mark.parametrize(("point", "occurrence"), [("end update", 5), ("end publish", 6), ("end commit", 5)])
async def test_a_killed_trainer_trains_again_on_the_batches_of_its_predecessor(
    forks: Zygote, tmp_path: Path, point: str, occurrence: int
) -> None:
    async with world(tmp_path) as here, rollout_controller.run(here.config, here.placement):
        killed = await forks.start(here, point, occurrence)
        async with asyncio.timeout(DEADLINE_S):
            assert await killed.ended == -9
            successor = await forks.start(here)
            assert await successor.ended == 0
        record = await here.names.get_version()
        await conserved(here, STEPS * BATCH)
    assert record is not None
    assert record.version == PolicyVersion(2, STEPS)
    replayed = {line["step"]: line["rollout/is_replay"] for line in here.stats() if line["step"] > 3}
    assert replayed[4] == 1
    assert sorted(replayed) == [4, 5, 6]


async def test_a_restarted_controller_gets_its_tasks_again(forks: Zygote, tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        async with rollout_controller.run(here.config, here.placement):
            trainer = await forks.start(here)
            async with asyncio.timeout(DEADLINE_S):
                await here.until_step(2)
        async with rollout_controller.run(here.config, here.placement):
            async with asyncio.timeout(DEADLINE_S):
                assert await trainer.ended == 0
            await conserved(here, STEPS * BATCH)
    assert [line["step"] for line in here.stats()] == list(range(1, STEPS + 1))


async def test_without_recovery_a_second_run_begins_anew_among_the_same_services(forks: Zygote, tmp_path: Path) -> None:
    async with world(tmp_path, recover={"mode": "disabled"}) as here:
        async with rollout_controller.run(here.config, here.placement), asyncio.timeout(DEADLINE_S):
            for term in (1, 2):
                trainer = await forks.start(here)
                assert await trainer.ended == 0
                record = await here.names.get_version()
                assert record is not None
                assert record.version == PolicyVersion(term, STEPS)
            await conserved(here, STEPS * BATCH)
    assert [line["version"] for line in here.stats()] == [f"v2.{step}" for step in range(1, STEPS + 1)]
