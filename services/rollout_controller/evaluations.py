"""Evaluations: tasks rolled out with one pinned version, outside the staleness budget, streamed as they finish."""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headway.core.trajectory import Outcome
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.waits import Waits
from services.rollout_controller.dispatcher import BatchTaskDispatcher, Slots
from services.rollout_controller.production import MAX_COLLECTED, FleetView, end_of, is_accepted
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, RolloutEnd, TaskInput

MAX_KEPT = 10_000
"""Evaluations kept for the report."""


@dataclass(slots=True)
class EvaluationRecord:
    """What a whole evaluation came to."""

    version: PolicyVersion
    num_samples: int = 0
    """Samples that ended in a reward."""
    reward_sum: float = 0.0
    num_failed: Counter[Outcome] = field(default_factory=Counter)
    """Tasks that did not, by reason."""

    def add(self, end: RolloutEnd) -> None:
        """Count one task's end."""
        if end.group is None:
            self.num_failed[end.outcome] += 1
            return
        self.num_samples += len(end.group.trajectories)
        self.reward_sum += sum(sample.reward for sample in end.group.trajectories)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    task_id: str
    """Unique over all evaluations."""
    task: TaskInput
    num_samples: int
    runner: GroupRunner


class Evaluations:
    """Runs any number of them, `max_concurrent` tasks at a time.

    Args:
        runner_of: Gives what rolls out the tasks of an evaluation of a version.
    """

    def __init__(
        self, runner_of: Callable[[PolicyVersion], GroupRunner], fleet: FleetView, settings: Settings, waits: Waits
    ) -> None:
        self._runner_of = runner_of
        self._fleet = fleet
        self._waits = waits
        self._num_streams = 0
        self.history: deque[EvaluationRecord] = deque(maxlen=MAX_KEPT)
        self.dispatcher: BatchTaskDispatcher[_Evaluation, RolloutEnd] = BatchTaskDispatcher(
            settings.queue_size, self._start, Slots(settings.max_concurrent), is_accepted
        )

    async def run(
        self, version: PolicyVersion, num_samples: int, tasks: AsyncIterator[TaskInput]
    ) -> AsyncIterator[tuple[str, RolloutEnd]]:
        """Roll out the tasks; yields each one's end as it comes. A token of another version is `evidence_invalid`.

        Raises:
            InvalidInput: There are no samples to make.
        """
        if num_samples < 1:
            raise InvalidInput("an evaluation needs num_samples of 1 or more")
        with self._waits.waiting_for(f"all servers to serve {version.label}, for an evaluation"):
            await self._fleet.wait_for_step(version.step)
        self._num_streams += 1
        owner, record = self._num_streams, EvaluationRecord(version)
        try:
            num_open = await self._submit(owner, self._runner_of(version), num_samples, tasks)
            while num_open:
                for result in await self.dispatcher.wait_any(MAX_COLLECTED, owner):
                    num_open -= 1
                    end = _pinned(end_of(result), version)
                    record.add(end)
                    yield result.task_id.partition("/")[2], end
            self.history.append(record)
        finally:
            self.dispatcher.forget(owner)

    async def _submit(self, owner: int, runner: GroupRunner, num_samples: int, tasks: AsyncIterator[TaskInput]) -> int:
        count = 0
        async for task in tasks:
            self.dispatcher.submit_task_input(_Evaluation(f"{owner}/{task.task_id}", task, num_samples, runner), owner)
            count += 1
        return count

    async def close(self) -> None:
        await self.dispatcher.close()

    @staticmethod
    def _start(evaluation: _Evaluation) -> Callable[[], Any]:
        return partial(evaluation.runner.run, evaluation.task, 1, evaluation.num_samples)


def _pinned(end: RolloutEnd, version: PolicyVersion) -> RolloutEnd:
    others = sorted(step for step in end.versions if step != version.step)
    if not others:
        return end
    return RolloutEnd(
        Outcome.EVIDENCE_INVALID, f"tokens of version step {others[0]} in an evaluation of {version.label}"
    )
