"""Every rollout ends in exactly one reason; a failure is never a reward; a group is whole or nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
import pytest

from headway.core.trajectory import NO_VERSION, Outcome, Trajectory
from headway.runtime.wire import group_from_wire
from headway.testing.virtual_time import run_virtual
from headway.workflow.api import EpisodeResult, InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from headway.workflow.errors import EvidenceInvalid, RewardFailed, RewardTimeout, ServerLost
from services.rollout_controller.rollouts import GroupRunner, RolloutEnd, TaskInput, timed

TASK = TaskInput("0/7", orjson.dumps({"answer": [1]}))


class Engine:
    """Answers after 2 s."""

    def get_version(self) -> int:
        return 3

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        await asyncio.sleep(2.0)
        return ModelResponse(req.input_ids, [5, 6], [-0.5, -0.5], [3, 4])


class Workflow(RolloutWorkflow):
    """Calls `episode` with the number of the sample."""

    def __init__(self, episode: Callable[[int, InferenceEngine, dict[str, Any]], Awaitable[EpisodeResult]]) -> None:
        self._episode = episode
        self.num_begun = self.num_ended = 0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        self.num_begun += 1
        try:
            return await self._episode(self.num_begun, engine, data)
        finally:
            self.num_ended += 1


def sample(reward: float = 1.0, versions: tuple[int, ...] = (NO_VERSION, 3, 4)) -> Trajectory:
    stamps = np.array(versions, np.int32)
    zeros = np.zeros(len(stamps), np.float32)
    return Trajectory(zeros.astype(np.int32), zeros, stamps != NO_VERSION, stamps, reward)


def roll_out(workflow: RolloutWorkflow, num_samples: int = 3, **options: Any) -> RolloutEnd:
    async def run() -> RolloutEnd:
        return await GroupRunner(workflow, Engine(), num_samples, **options).run(TASK, attempt=2)

    return run_virtual(run())


def test_an_accepted_group_has_all_its_samples_and_knows_its_versions() -> None:
    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        return sample(float(number))

    end = roll_out(Workflow(episode))
    assert end.outcome is Outcome.ACCEPTED
    assert end.versions == {3: 3, 4: 3}
    assert end.group is not None
    group = group_from_wire(end.group)
    assert (group.task_id, group.attempt) == ("0/7", 2)
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RewardTimeout("slow"), Outcome.REWARD_TIMEOUT),
        (RewardFailed("died"), Outcome.REWARD_ERROR),
        (ServerLost("gone"), Outcome.SERVER_LOST),
        (EvidenceInvalid("lies"), Outcome.EVIDENCE_INVALID),
        (KeyError("a bug"), Outcome.WORKFLOW_ERROR),
    ],
)
def test_the_first_failure_ends_the_group_with_its_reason(error: Exception, outcome: Outcome) -> None:
    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        if number == 2:
            raise error
        await asyncio.sleep(1e6)
        return sample()

    workflow = Workflow(episode)
    end = roll_out(workflow)
    assert end.outcome is outcome
    assert end.group is None
    assert type(error).__name__ in end.message
    assert workflow.num_ended == workflow.num_begun == 3


def test_a_sample_of_nothing_rejects_the_group() -> None:
    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        return None if number == 2 else sample()

    assert roll_out(Workflow(episode)).outcome is Outcome.REJECTED


async def two_rewards(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
    return sample(float(number % 2))


@pytest.mark.parametrize(
    ("accepts", "outcome"),
    [
        (lambda group: group["rewards"].mean() > 0.5, Outcome.ACCEPTED),
        (lambda group: group["rewards"].mean() > 0.9, Outcome.REJECTED),
        (lambda group: 1 // 0, Outcome.WORKFLOW_ERROR),
    ],
)
def test_the_filter_sees_the_whole_group(accepts: Any, outcome: Outcome) -> None:
    assert roll_out(Workflow(two_rewards), should_accept=accepts).outcome is outcome


def test_each_sample_has_its_own_copy_of_the_row() -> None:
    seen = []

    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        data["answer"].append(number)
        seen.append(data["answer"])
        return sample()

    roll_out(Workflow(episode))
    assert seen == [[1, 1], [1, 2], [1, 3]]


def test_where_the_time_went_is_told_by_phase() -> None:
    async def reward_fn(*args: Any, **data: Any) -> float:
        await asyncio.sleep(0.5)
        return 1.0

    score = timed(reward_fn)

    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        await engine.agenerate(ModelRequest())
        return sample(await score("prompt", "completion", [], [], **data))

    end = roll_out(Workflow(episode))
    assert (end.generate_s, end.reward_s, end.rollout_s) == (2.0, 0.5, 2.5)


def test_a_workflow_that_hangs_in_its_own_code_is_ended() -> None:
    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        for _ in range(4):
            await engine.agenerate(ModelRequest())
        await asyncio.get_running_loop().create_future()
        return None

    end = roll_out(Workflow(episode), stall_limit_s=5.0)
    assert end.outcome is Outcome.WORKFLOW_ERROR
    assert "neither generated nor scored for 5 s" in end.message
    assert 8.0 + 5.0 <= end.rollout_s < 8.0 + 2 * 5.0


def test_a_call_that_takes_long_is_no_stall() -> None:
    async def reward_fn(*args: Any, **data: Any) -> float:
        await asyncio.sleep(100.0)
        return 1.0

    score = timed(reward_fn)

    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        return sample(await score())

    assert roll_out(Workflow(episode), stall_limit_s=5.0).outcome is Outcome.ACCEPTED


def test_a_timeout_of_the_workflows_own_is_a_workflow_error_by_its_own_name() -> None:
    async def episode(number: int, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        async with asyncio.timeout(1.0):
            await asyncio.sleep(2.0)
        return sample()

    end = roll_out(Workflow(episode), stall_limit_s=50.0)
    assert end.outcome is Outcome.WORKFLOW_ERROR
    assert "neither" not in end.message
