"""A group is rolled out whole or not at all, and its samples share nothing but the row that they were copied from."""

import asyncio
from typing import Any

import numpy as np
import pytest

from headway.core.trajectory import Outcome, Trajectory
from headway.workflow import GroupView, InferenceEngine, RolloutWorkflow, rewards_differ, run_group
from headway.workflow.errors import EvidenceInvalid, RewardFailed, RewardTimeout, ServerLost, outcome_of
from headway.workflow.group import current_group


def trajectory_of(reward: float, length: int = 3) -> Trajectory:
    mask = np.arange(length) > 0
    versions = np.where(mask, 1, -1).astype(np.int32)
    return Trajectory(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), mask, versions, reward)


class Scripted(RolloutWorkflow):
    """Runs a coroutine function of the row."""

    def __init__(self, episode: Any) -> None:
        self.episode = episode

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        return await self.episode(data)


ENGINE: Any = None


async def test_each_sample_has_its_own_copy_of_the_row() -> None:
    row = {"messages": [{"role": "user", "content": "hi"}]}

    async def episode(data: dict[str, Any]) -> Trajectory:
        data["messages"].append("mine")
        await asyncio.sleep(0)
        return trajectory_of(len(data["messages"]))

    group = await run_group(Scripted(episode), ENGINE, row, 4)
    assert group is not None
    assert [trajectory.reward for trajectory in group] == [2, 2, 2, 2]
    assert row == {"messages": [{"role": "user", "content": "hi"}]}


async def test_one_rejected_sample_rejects_the_group() -> None:
    answers = iter([trajectory_of(1), None, trajectory_of(0)])

    async def episode(data: dict[str, Any]) -> Trajectory | None:
        return next(answers)

    assert await run_group(Scripted(episode), ENGINE, {}, 3) is None


async def test_the_first_failure_ends_the_others_and_is_raised_as_it_is() -> None:
    cancelled = 0
    numbers = iter(range(4))

    async def episode(data: dict[str, Any]) -> Trajectory:
        nonlocal cancelled
        if next(numbers) == 3:
            raise RewardTimeout("slow")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError

    with pytest.raises(RewardTimeout, match="slow"):
        await run_group(Scripted(episode), ENGINE, {}, 4)
    assert cancelled == 3


async def test_samples_of_one_group_share_its_name_and_no_others_do() -> None:
    names: list[str] = []

    async def episode(data: dict[str, Any]) -> Trajectory:
        names.append(current_group.get())
        return trajectory_of(1)

    await asyncio.gather(*(run_group(Scripted(episode), ENGINE, {}, 3) for _ in range(2)))
    assert len(names) == 6
    assert len(set(names)) == 2
    assert "" not in names


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RewardTimeout(""), Outcome.REWARD_TIMEOUT),
        (RewardFailed(""), Outcome.REWARD_ERROR),
        (ServerLost(""), Outcome.SERVER_LOST),
        (EvidenceInvalid(""), Outcome.EVIDENCE_INVALID),
        (asyncio.CancelledError(), Outcome.CANCELLED),
        (ZeroDivisionError(), Outcome.WORKFLOW_ERROR),
    ],
)
def test_every_failure_has_one_reason(error: BaseException, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


def test_filters_see_a_group_as_padded_arrays() -> None:
    view = GroupView([trajectory_of(1.0, 3), trajectory_of(0.0, 2)])
    assert view["rewards"].tolist() == [1.0, 0.0]
    assert view["input_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert view["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert set(view) == {"input_ids", "logprobs", "loss_mask", "versions", "rewards", "attention_mask"}
    assert "text" not in view


@pytest.mark.parametrize(("rewards", "is_accepted"), [([1, 0], True), ([1, 1], False), ([0, 0], False)])
def test_groups_without_a_gradient_are_filtered(rewards: list[float], is_accepted: bool) -> None:
    assert rewards_differ(GroupView([trajectory_of(reward) for reward in rewards])) is is_accepted
