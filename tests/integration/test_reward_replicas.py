"""Rewards come from whichever replicas there are: found by name, spread by load, asked elsewhere when one is gone."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headway.config import ExperimentConfig, load_experiment
from headway.runtime.names import NameClient
from headway.runtime.rewards import RewardClient, follow_replicas
from headway.runtime.service import Placement
from headway.v1 import reward_pb2 as pb
from headway.workflow.errors import RewardTimeout
from services.name_resolve import app as name_resolve
from services.reward import app as reward


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\n"
        "reward: {function: exact, num_workers: 1, max_queued: 64}\n"
        "cluster: {name_resolve: {type: memory}}\n"
    )
    return load_experiment(path)


class Replicated:
    """Reward services behind a name-resolve, and a client that finds them there."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.rewards = RewardClient(timeout_s=2)
        self._config = config
        self._stack = AsyncExitStack()
        self._replicas: list[AsyncExitStack] = []

    async def __aenter__(self) -> "Replicated":
        running = await self._stack.enter_async_context(name_resolve.run(self._config, Placement()))
        self._names_at = f"127.0.0.1:{running.ports['grpc']}"
        names = await self._stack.enter_async_context(NameClient(self._names_at, self._config.run_name))
        await self._stack.enter_async_context(self.rewards)
        following = asyncio.ensure_future(follow_replicas(names, self.rewards))
        self._stack.callback(following.cancel)
        return self

    async def __aexit__(self, *error: object) -> None:
        for replica in self._replicas:
            await replica.aclose()
        await self._stack.aclose()

    async def start(self) -> None:
        replica = AsyncExitStack()
        placement = Placement(name_resolve=self._names_at, instance=str(len(self._replicas)))
        await replica.enter_async_context(reward.run(self._config, placement))
        self._replicas.append(replica)

    async def stop(self, index: int) -> None:
        await self._replicas[index].aclose()


async def test_replicas_are_found_by_name_and_share_the_load(config: ExperimentConfig) -> None:
    async with Replicated(config) as replicated:
        await replicated.start()
        await replicated.start()
        await replicated.rewards.wait_for_replicas(2, timeout_s=10)
        rewards = replicated.rewards
        assert sum(await asyncio.gather(*[rewards.score(str(n), data={"answer": "5"}) for n in range(100)])) == 1
        assert min(rewards.num_answered.values()) >= 40
        assert all(isinstance(status, pb.RewardStatus) for status in (await rewards.statuses()).values())


async def test_a_replica_that_stops_costs_no_reward(config: ExperimentConfig) -> None:
    async with Replicated(config) as replicated:
        await replicated.start()
        await replicated.start()
        await replicated.rewards.wait_for_replicas(2, timeout_s=10)
        score = replicated.rewards.score
        asked = [asyncio.ensure_future(score(str(n), data={"answer": str(n)})) for n in range(400)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await replicated.stop(0)
        asked += [asyncio.ensure_future(score("x", data={"answer": "x"})) for n in range(50)]
        assert await asyncio.gather(*asked) == [1.0] * 450


async def test_rewards_wait_for_the_first_replica(config: ExperimentConfig) -> None:
    async with Replicated(config) as replicated:
        asked = asyncio.ensure_future(replicated.rewards.score("1", data={"answer": "1"}))
        await replicated.start()
        assert await asked == 1.0


async def test_without_a_replica_the_call_ends_with_a_timeout_that_says_so() -> None:
    async with RewardClient(timeout_s=0.1, queueing_s=0.1) as client:
        with pytest.raises(RewardTimeout, match="no reward service answered within 0 s \\(there is none\\)"):
            await client.score("1", data={"answer": "1"})
