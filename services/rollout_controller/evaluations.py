"""Evaluations: tasks rolled out with one pinned version, outside the staleness budget, streamed as they finish."""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from headway.core.trajectory import Outcome
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.waits import Waits
from services.rollout_controller.dispatcher import BatchTaskDispatcher, Slots
from services.rollout_controller.production import MAX_COLLECTED, FleetView, Writes, end_of, is_accepted
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, RolloutEnd, TaskInput

MAX_KEPT = 10_000
"""Evaluations kept for the report."""


@dataclass(slots=True)
class EvaluationRecord:
    """What an evaluation comes to."""

    version: PolicyVersion
    began_at: float = 0.0
    """Unix seconds."""
    ended_at: float | None = None
    """None: it runs."""
    num_tasks: int = 0
    """Those that were handed in so far."""
    num_ended: int = 0
    num_samples: int = 0
    """Samples that ended in a reward."""
    reward_sum: float = 0.0
    num_failed: Counter[Outcome] = field(default_factory=Counter)
    """Tasks that did not, by reason."""

    def add(self, end: RolloutEnd) -> None:
        """Count one task's end."""
        self.num_ended += 1
        if end.group is None:
            self.num_failed[end.outcome] += 1
            return
        self.num_samples += len(end.group.trajectories)
        self.reward_sum += sum(sample.reward for sample in end.group.trajectories)

    def to_json(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self) | {"num_failed": {outcome.value: count for outcome, count in self.num_failed.items()}}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> "EvaluationRecord":
        """As the journal kept it."""
        failed = Counter({Outcome(outcome): count for outcome, count in kept["num_failed"].items()})
        return cls(**kept | {"version": PolicyVersion(*kept["version"]), "num_failed": failed})


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
        writes: The journal, where whole evaluations are kept.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        runner_of: Callable[[PolicyVersion], GroupRunner],
        fleet: FleetView,
        settings: Settings,
        waits: Waits,
        writes: Writes,
        wall_clock: Callable[[], float],
    ) -> None:
        self._runner_of = runner_of
        self._fleet = fleet
        self._waits = waits
        self._writes = writes
        self._wall_clock = wall_clock
        self._num_streams = 0
        self.running: dict[int, EvaluationRecord] = {}
        """In the order in which they began."""
        self.history: deque[EvaluationRecord] = deque(maxlen=MAX_KEPT)
        self._slots = Slots(settings.max_concurrent)
        self.dispatcher: BatchTaskDispatcher[_Evaluation, RolloutEnd] = BatchTaskDispatcher(
            settings.queue_size, self._start, self._slots, is_accepted
        )

    def restore(self, kept: Iterable[dict[str, Any]]) -> None:
        """Take up the whole evaluations that the journal has."""
        self.history.extend(EvaluationRecord.from_json(record) for record in kept)

    def forget(self) -> None:
        """A new run begins."""
        self.history.clear()

    def resize(self, max_concurrent: int) -> None:
        """Run so many tasks at a time from now on."""
        self._slots.resize(max_concurrent)
        self.dispatcher.wake()

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
        owner, record = self._num_streams, EvaluationRecord(version, self._wall_clock())
        self.running[owner] = record
        try:
            await self._submit(owner, self._runner_of(version), num_samples, tasks)
            while record.num_ended < record.num_tasks:
                for result in await self.dispatcher.wait_any(MAX_COLLECTED, owner):
                    end = _pinned(end_of(result), version)
                    record.add(end)
                    yield result.task_id.partition("/")[2], end
            self._keep(record)
        finally:
            del self.running[owner]
            self.dispatcher.forget(owner)

    async def _submit(self, owner: int, runner: GroupRunner, num_samples: int, tasks: AsyncIterator[TaskInput]) -> None:
        async for task in tasks:
            self.dispatcher.submit_task_input(_Evaluation(f"{owner}/{task.task_id}", task, num_samples, runner), owner)
            self.running[owner].num_tasks += 1

    def _keep(self, record: EvaluationRecord) -> None:
        record.ended_at = self._wall_clock()
        self.history.append(record)
        kept = record.to_json()
        self._writes.begin(lambda store: store.add_evaluation(kept))

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
