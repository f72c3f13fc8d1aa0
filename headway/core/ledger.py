"""Keep account of every task: each is in exactly one state, every rollout ends in one reason, nothing is lost.

    submit -> PENDING -> RUNNING -> SAVING -> READY -> LEASED -> CONSUMED
                 ^          |                   |
                 |          +-> REJECTED        |       the workflow or the filter said no
                 +----------+-------------------+       failed, cancelled, or too old: queued again ...
                            +-> QUARANTINED             ... up to `max_attempts` starts

SAVING is the time between a rollout's end and the moment its group is safe on disk. Groups handed out for a step are
LEASED until the step commits; they count as outstanding until the fleet serves the version that the step made.

Guarantee (conservation), after every call:
submitted = consumed + leased + ready + saving + running + pending + rejected + quarantined.
`check` compares the counters with the records. A group is in at most one batch. Nothing goes back from LEASED.

Consumed, rejected and quarantined tasks leave no record in memory: the journal remembers their ids.

Pure: no clock, no I/O.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headway.core.selection import Candidate
from headway.core.trajectory import Outcome

MAX_ATTEMPTS = 3
MAX_MESSAGE_CHARS = 300
MAX_EXAMPLES = 5
"""Failures kept of each reason, the last ones."""
MAX_KEPT = 1000
"""Quarantined tasks whose history is kept, the last ones."""


class TaskState(StrEnum):
    """Where a task is."""

    PENDING = "pending"
    RUNNING = "running"
    SAVING = "saving"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    REJECTED = "rejected"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt that did not end in a consumed group."""

    task_id: str
    attempt: int
    outcome: Outcome
    message: str


@dataclass(slots=True)
class TaskRecord:
    """What is known of a task that has not ended."""

    task_id: str
    order: int
    """Place in the order of submission."""
    state: TaskState = TaskState.PENDING
    attempt: int = 0
    """How often it was started."""
    started_at: int = 0
    """Step that the fleet served when it was last started."""
    versions: dict[int, int] = field(default_factory=dict)
    """Gradient-carrying tokens of its group by the step of the version that made them, once there is a group."""
    history: list[Failure] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        """Version of the oldest token; before there are tokens, the one that generates them."""
        return min(self.versions, default=self.started_at)

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.task_id, self.order, self.oldest, max(self.versions, default=self.started_at))


@dataclass(slots=True)
class Batch:
    """The groups handed out for one step."""

    step: int
    task_ids: tuple[str, ...]
    is_committed: bool = False


class Ledger:
    """The account of one run's tasks and batches."""

    def __init__(self, max_attempts: int = MAX_ATTEMPTS) -> None:
        self.max_attempts = max_attempts
        self.records: dict[str, TaskRecord] = {}
        self.batches: dict[int, Batch] = {}
        self.counts: Counter[TaskState] = Counter()
        self.num_submitted = 0
        self.num_discarded: Counter[Outcome] = Counter()
        """Attempts that did not end in a consumed group, by their reason."""
        self.quarantined: dict[str, list[Failure]] = {}
        """The last tasks that were given up, with the history of each."""
        self.examples: dict[Outcome, list[Failure]] = {}
        self.next_step = 0
        """The first step for which no batch, and none of a later step, was handed out."""
        self.served_step = 0
        """The newest step that the whole fleet has served."""
        self._unserved: dict[int, int] = {}
        """Number of groups handed out, by the steps whose version is not served yet. Outlives `forget_before`."""
        self._next_order = 0

    # ---- the life of a task

    def submit(self, task_id: str) -> bool:
        """Take up a task; False: it is known already."""
        if task_id in self.records:
            return False
        self.records[task_id] = TaskRecord(task_id, self._next_order)
        self._next_order += 1
        self.num_submitted += 1
        self.counts[TaskState.PENDING] += 1
        return True

    def start(self, task_id: str) -> int:
        """Start a pending task; returns which attempt this is, 1 for the first."""
        record = self._move(task_id, TaskState.PENDING, TaskState.RUNNING)
        record.attempt += 1
        record.started_at = self.served_step
        return record.attempt

    def save(self, task_id: str, versions: Mapping[int, int]) -> None:
        """A rollout ended in a group, with so many tokens of each version; it is being written."""
        self._move(task_id, TaskState.RUNNING, TaskState.SAVING).versions = dict(versions)

    def ready(self, task_id: str) -> None:
        """The group is safe: it may be handed out."""
        self._move(task_id, TaskState.SAVING, TaskState.READY)

    def reject(self, task_id: str, message: str = "") -> None:
        """The workflow returned nothing, or the filter said no: the task has ended."""
        record = self._move(task_id, TaskState.RUNNING, TaskState.REJECTED)
        self._note(record, Outcome.REJECTED, message)
        del self.records[task_id]

    def fail(self, task_id: str, outcome: Outcome, message: str = "") -> bool:
        """A running rollout failed, or a ready group is too old. True: it is pending again; False: quarantined."""
        record = self.records[task_id]
        if record.state not in (TaskState.RUNNING, TaskState.READY):
            raise ValueError(f"task {task_id} failed, but it is {record.state}")
        record.history.append(self._note(record, outcome, message))
        record.versions = {}
        if record.attempt < self.max_attempts:
            self._set(record, TaskState.PENDING)
            return True
        self._set(record, TaskState.QUARANTINED)
        self._remember_quarantined(record)
        del self.records[task_id]
        return False

    # ---- batches

    def lease(self, step: int, task_ids: Sequence[str]) -> Batch:
        """Hand out ready groups for a step."""
        if step in self.batches:
            raise ValueError(f"step {step} has a batch already")
        for task_id in task_ids:
            self._move(task_id, TaskState.READY, TaskState.LEASED)
        self.batches[step] = Batch(step, tuple(task_ids))
        self.hand_out(step, len(task_ids))
        self.next_step = max(self.next_step, step + 1)
        return self.batches[step]

    def hand_out(self, step: int, num_groups: int) -> None:
        """So many groups are outstanding until `step` is served."""
        if step >= self.served_step:
            self._unserved[step] = num_groups

    def serve(self, step: int) -> None:
        """The whole fleet serves `step`: what was handed out for earlier ones is outstanding no more."""
        self.served_step = max(self.served_step, step)
        for old in [known for known in self._unserved if known < self.served_step]:
            del self._unserved[old]

    def commit(self, step: int) -> bool:
        """The step has consumed its batch; False: it was committed already."""
        batch = self.batches[step]
        if batch.is_committed:
            return False
        for task_id in batch.task_ids:
            self._move(task_id, TaskState.LEASED, TaskState.CONSUMED)
            del self.records[task_id]
        batch.is_committed = True
        return True

    def skip(self, step: int) -> None:
        """The step made no version: its groups are consumed, and another batch may be composed for it."""
        self.commit(step)
        del self.batches[step]
        self._unserved.pop(step, None)
        self.next_step = max(self.batches, default=step - 1) + 1

    def forget_before(self, step: int) -> int:
        """Drop the committed batches of earlier steps; returns how many groups that are."""
        old = [batch for batch in self.batches.values() if batch.step < step and batch.is_committed]
        for batch in old:
            del self.batches[batch.step]
        return sum(len(batch.task_ids) for batch in old)

    # ---- after a restart

    def restore_ready(self, task_id: str, attempt: int, versions: Mapping[int, int], started_at: int) -> None:
        """Take up a group that the journal kept."""
        self.submit(task_id)
        record = self.records[task_id]
        record.attempt, record.versions, record.started_at = attempt, dict(versions), started_at
        self._set(record, TaskState.READY)

    def restore_batch(self, step: int, task_ids: Sequence[str], is_committed: bool) -> None:
        """Take up a batch that the journal kept."""
        for task_id in task_ids:
            self.restore_ready(task_id, 1, {}, 0)
        self.lease(step, task_ids)
        if is_committed:
            self.commit(step)

    def restore_forgotten(self, step: int, num_groups: int) -> None:
        """Take up a step whose batch the journal has forgotten."""
        self.hand_out(step, num_groups)
        self.next_step = max(self.next_step, step + 1)

    def restore_failure(self, failure: Failure) -> None:
        """Take up a failed attempt of a task that was submitted again."""
        record = self.records[failure.task_id]
        record.attempt = max(record.attempt, failure.attempt)
        record.history.append(failure)

    def restore_ended(self, state: TaskState, count: int) -> None:
        """Take up the number of tasks that had ended."""
        self.counts[state] += count
        self.num_submitted += count

    # ---- questions

    @property
    def num_outstanding(self) -> int:
        """Groups started and not yet trained on: running, made, or handed out for a step that is not served yet."""
        made = self.counts[TaskState.SAVING] + self.counts[TaskState.READY]
        return self.counts[TaskState.RUNNING] + made + sum(self._unserved.values())

    @property
    def num_open(self) -> int:
        """Tasks that may still become part of a batch: pending, running, being saved, or ready."""
        states = (TaskState.PENDING, TaskState.RUNNING, TaskState.SAVING, TaskState.READY)
        return sum(self.counts[state] for state in states)

    def in_state(self, *states: TaskState) -> Iterable[TaskRecord]:
        return (record for record in self.records.values() if record.state in states)

    def check(self) -> None:
        """Prove the guarantee from the records.

        Raises:
            AssertionError: A counter and the records differ, or a task is in no state or in two.
        """
        found = Counter(record.state for record in self.records.values())
        ended = (TaskState.CONSUMED, TaskState.REJECTED, TaskState.QUARANTINED)
        counted = {state: count for state, count in self.counts.items() if count and state not in ended}
        assert counted == dict(found), f"counted {counted}, found {dict(found)}"
        assert self.num_submitted == sum(self.counts.values()), f"{self.num_submitted} submitted, {self.counts}"
        leased = Counter(task_id for batch in self.batches.values() for task_id in batch.task_ids)
        assert all(count == 1 for count in leased.values()), "a group is in two batches"

    # ---- inside

    def _move(self, task_id: str, before: TaskState, after: TaskState) -> TaskRecord:
        record = self.records[task_id]
        if record.state is not before:
            raise ValueError(f"task {task_id} cannot become {after}: it is {record.state}, not {before}")
        self._set(record, after)
        return record

    def _set(self, record: TaskRecord, state: TaskState) -> None:
        self.counts[record.state] -= 1
        self.counts[state] += 1
        record.state = state

    def _note(self, record: TaskRecord, outcome: Outcome, message: str) -> Failure:
        failure = Failure(record.task_id, record.attempt, outcome, message[:MAX_MESSAGE_CHARS])
        self.num_discarded[outcome] += 1
        examples = self.examples.setdefault(outcome, [])
        examples.append(failure)
        del examples[:-MAX_EXAMPLES]
        return failure

    def _remember_quarantined(self, record: TaskRecord) -> None:
        self.quarantined[record.task_id] = record.history
        while len(self.quarantined) > MAX_KEPT:
            del self.quarantined[next(iter(self.quarantined))]
