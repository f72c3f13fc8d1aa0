"""Make groups of tasks: start rollouts while the budget allows, account for each one's end, write what is accepted.

    submit --> pending --[budget]--> running --> account --+--> journal --> ready
                  ^                                        |
                  +--- failed, cancelled, too old (3x) ----+--> rejected, quarantined

One `Production` is one run; a new run gets a new one, and what is still on its way in the old one comes to nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from headway.core.ledger import Failure, Ledger, TaskState
from headway.core.selection import can_be_in_time
from headway.core.staleness import StalenessManager
from headway.core.trajectory import Outcome
from headway.errors import HeadwayError
from headway.runtime.supervisor import Supervisor
from services.rollout_controller.dispatcher import BatchTaskDispatcher
from services.rollout_controller.journal_store import GroupRecord, JournalStore, ReadyRecord, StoredGroup
from services.rollout_controller.records import Settings, Timing
from services.rollout_controller.rollouts import GroupRunner, RolloutEnd, TaskInput
from services.rollout_controller.task_runner import TimedResult, Withdrawn

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_COLLECTED = 1024
"""Results taken at once."""
MIN_HOPELESS = 16
"""Tasks given up before a run in which nothing has worked yet is said to be hopeless; a batch, where that is more."""


class FleetView(Protocol):
    """What the controller must know of the inference servers."""

    @property
    def served_step(self) -> int | None:
        """The lowest step among the versions that ready servers serve; None when there is no ready server."""
        ...

    async def wait_for_step(self, step: int) -> None:
        """Return once every ready server, and at least one, serves `step` or a later one."""
        ...


class JournalWriter(Protocol):
    """Where finished groups are kept: `services.rollout_controller.journal.Journal`."""

    def write(self, operation: Callable[[JournalStore], T]) -> "asyncio.Future[T]": ...

    def pages(self, step: int, record_ids: Sequence[int] = ()) -> AsyncIterator[list[StoredGroup]]: ...


class Writes:
    """Writes to the journal, of which none may fail: the first that does ends the process."""

    def __init__(self, journal: JournalWriter, supervisor: Supervisor) -> None:
        self._journal = journal
        self._supervisor = supervisor

    def begin(self, operation: Callable[[JournalStore], T]) -> "asyncio.Future[T]":
        """Write, without waiting for it."""
        future = self._journal.write(operation)
        future.add_done_callback(self._fail_if_broken)
        return future

    async def done(self, operation: Callable[[JournalStore], T]) -> T:
        """Write, and wait until it is on disk. The write takes place even when the wait is cancelled."""
        return await asyncio.shield(self.begin(operation))

    def _fail_if_broken(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._supervisor.start("write the journal", _raise(error))


class Production:
    """Tasks, budget and running rollouts of one run.

    Args:
        settings: What the experiment file says.
        runner: Rolls out a task.
        writes: The journal.
        supervisor: Ends the process when the account fails.
        on_change: Told whenever a group may have become ready, or a task has ended.
    """

    def __init__(
        self,
        settings: Settings,
        runner: GroupRunner,
        writes: Writes,
        supervisor: Supervisor,
        on_change: Callable[[], None],
    ) -> None:
        self.ledger = Ledger(settings.max_attempts)
        self.budget = StalenessManager(self, settings.max_concurrent, settings.batch_size, settings.eta)
        self.dispatcher: BatchTaskDispatcher[TaskInput, RolloutEnd] = BatchTaskDispatcher(
            settings.queue_size, self._start, self.budget, is_accepted
        )
        self.dispatcher.pause()
        self.timing = Timing()
        self.num_outcomes: Counter[Outcome] = Counter()
        self._eta = settings.eta
        self._is_served = self._is_held = False
        self._hopeless_after = max(settings.batch_size, MIN_HOPELESS)
        self._runner = runner
        self._writes = writes
        self._on_change = on_change
        self._inputs: dict[str, TaskInput] = {}
        """Rows of the tasks that may have to be started, once more or at all."""
        self._is_closed = False
        self._collecting = supervisor.start("collect rollouts", self._collect())

    def get_version(self) -> int:
        """The step that counts for the budget: batches of earlier steps are outstanding no more."""
        return self.ledger.served_step

    async def close(self) -> None:
        """Cancel what runs; returns when nothing does."""
        self._is_closed = True
        self._collecting.cancel()
        await self.dispatcher.close()

    # ---- in

    def submit(self, tasks: Sequence[TaskInput], failures: Sequence[Failure]) -> int:
        """Take up those tasks that are not here yet, with what failed before; returns how many."""
        taken = {task.task_id: task for task in tasks if self.ledger.submit(task.task_id)}
        for failure in failures:
            if failure.task_id in taken:
                self.ledger.restore_failure(failure)
        for task in taken.values():
            self._inputs[task.task_id] = task
            self.dispatcher.submit_task_input(task)
        return len(taken)

    def restore(self, group: ReadyRecord) -> None:
        """Take up a group that the journal kept."""
        self.ledger.restore_ready(group.task_id, group.attempt, group.versions, group.started_at)
        self._inputs[group.task_id] = TaskInput(group.task_id, group.data)

    def serve(self, step: int) -> None:
        """The whole fleet serves `step`: the budget opens."""
        self.ledger.serve(step)
        self._is_served = True
        self.hold(self._is_held)

    def hold(self, is_held: bool) -> None:
        """Start nothing, until told otherwise; what runs goes on and is collected."""
        self._is_held = is_held
        if is_held:
            self.dispatcher.pause()
        elif self._is_served:
            self.dispatcher.resume()

    def change(self, settings: Settings) -> None:
        """Go by another eta and another number of concurrent tasks from now on."""
        self._eta = self.budget.max_staleness = settings.eta
        self.budget.max_concurrent_rollouts = settings.max_concurrent

    def recount(self) -> None:
        """Count the budget anew from the account, and start what it allows."""
        self.budget.rebase(self.ledger.num_outstanding)
        self.dispatcher.wake()

    # ---- out

    def release(self, task_ids: Sequence[str]) -> None:
        """Groups are handed out: their tasks will not be started again."""
        for task_id in task_ids:
            del self._inputs[task_id]

    def discard_stale(self, task_ids: Sequence[str], step: int) -> None:
        """Ready groups are too old for this step and all later ones: their tasks are queued again."""
        for task_id in task_ids:
            oldest = self.ledger.records[task_id].oldest
            message = f"made from version step {oldest} on, too old for step {step} with eta {self._eta}"
            self._fail(task_id, Outcome.STALE, message)
        self._writes.begin(lambda store: store.discard(task_ids))

    def cancel_late(self) -> None:
        """Rollouts whose first tokens are too old for the next step are not worth their end."""
        next_step = self.ledger.next_step
        for record in self.ledger.in_state(TaskState.RUNNING):
            if not can_be_in_time(record.started_at, next_step, self._eta):
                reason = f"started at version step {record.started_at}, too late for step {next_step}"
                self.dispatcher.cancel(record.task_id, reason)

    # ---- between

    def _start(self, task: TaskInput) -> Callable[[], Any]:
        return partial(self._runner.run, task, self.ledger.start(task.task_id))

    async def _collect(self) -> None:
        """Account for every rollout that ends.

        consumes: results                                             waits for: a rollout that ends
        produces: groups on their way to the disk, tasks queued again
        """
        while True:
            for result in await self.dispatcher.wait_any(MAX_COLLECTED):
                self._account(result, end_of(result))
            self._check_hope()
            self._on_change()

    def _account(self, result: TimedResult[RolloutEnd], end: RolloutEnd) -> None:
        self.num_outcomes[end.outcome] += 1
        if end.outcome is Outcome.ACCEPTED:
            self._save(result, end)
        elif end.outcome is Outcome.REJECTED:
            self._reject(result.task_id, end.message)
        else:
            self._fail(result.task_id, end.outcome, end.message)

    def _check_hope(self) -> None:
        """End a run in which nothing works, instead of giving up one task after the other.

        Raises:
            HeadwayError: `MIN_HOPELESS` tasks, and a whole batch, were given up, and no group was ever made.
        """
        counts = self.ledger.counts
        has_worked = any(counts[state] for state in (TaskState.READY, TaskState.LEASED, TaskState.CONSUMED))
        if has_worked or self.num_outcomes[Outcome.ACCEPTED] or counts[TaskState.QUARANTINED] < self._hopeless_after:
            return
        last = self.ledger.quarantined[next(reversed(self.ledger.quarantined))][-1]
        raise HeadwayError(
            f"all of the first {counts[TaskState.QUARANTINED]} tasks failed {last.attempt} times each, none succeeded; "
            f"the last one, {last.task_id}: {last.outcome}: {last.message}"
        )

    def _save(self, result: TimedResult[RolloutEnd], end: RolloutEnd) -> None:
        """Write an accepted group; it is ready when it is on disk."""
        assert end.group is not None
        task_id = result.task_id
        self.ledger.save(task_id, end.versions)
        task = self.ledger.records[task_id]
        row, payload = self._inputs[task_id].data_json, end.group.SerializeToString()
        record = GroupRecord(task_id, task.attempt, task.started_at, dict(end.versions), row, payload)
        saved = self._writes.begin(lambda store: store.append(record))
        saved.add_done_callback(partial(self._on_saved, result, end))

    def _on_saved(self, result: TimedResult[RolloutEnd], end: RolloutEnd, saved: "asyncio.Future[None]") -> None:
        if self._is_closed or saved.cancelled() or saved.exception() is not None:
            return
        self.ledger.ready(result.task_id)
        timing = self.timing
        timing.num += 1
        timing.pending_s += result.started_at - result.enqueued_at
        timing.rollout_s += end.rollout_s
        timing.generate_s += end.generate_s
        timing.reward_s += end.reward_s
        timing.journal_s += asyncio.get_running_loop().time() - result.finished_at
        self._on_change()

    def _reject(self, task_id: str, message: str) -> None:
        self.ledger.reject(task_id, message)
        del self._inputs[task_id]
        self._writes.begin(lambda store: store.end(task_id, TaskState.REJECTED, message))

    def _fail(self, task_id: str, outcome: Outcome, message: str) -> None:
        """An attempt came to nothing: queue the task again, or give it up."""
        record = self.ledger.records[task_id]
        log.warning("task %s, attempt %d: %s: %s", task_id, record.attempt, outcome, message)
        if self.ledger.fail(task_id, outcome, message):
            self.dispatcher.submit_task_input(self._inputs[task_id], is_first=True)
            self._writes.begin(lambda store: store.fail(record.history[-1]))
        else:
            del self._inputs[task_id]
            log.error("task %s is quarantined after %d attempts", task_id, record.attempt)
            self._writes.begin(lambda store: store.end(task_id, TaskState.QUARANTINED, f"{outcome}: {message}"))


def is_accepted(end: RolloutEnd | None) -> bool:
    """Whether a rollout became a group."""
    return end is not None and end.outcome is Outcome.ACCEPTED


def end_of(result: TimedResult[RolloutEnd]) -> RolloutEnd:
    """How a rollout ended, also when it was cancelled."""
    match result.error:
        case None if result.data is not None:
            return result.data
        case Withdrawn() as withdrawn:
            return RolloutEnd(Outcome.CANCELLED, str(withdrawn))
        case asyncio.CancelledError():
            return RolloutEnd(Outcome.CANCELLED, "the workflow cancelled itself")
        case error:
            return RolloutEnd(Outcome.WORKFLOW_ERROR, f"{type(error).__name__}: {error}")


async def _raise(error: BaseException) -> None:
    raise error
