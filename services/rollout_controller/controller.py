"""The rollout controller's logic as one asyncio object: tasks in, batches of bounded staleness out.

              submit                                                  fetch_batch(step)
    trainer --------> pending --[budget]--> running --> journal --> ready --------> leased --commit--> consumed
                         ^                     |                      |
                         +----- failed (3x) ---+------- stale --------+

What it decides stands in `headway.core`: the budget (staleness), the account (ledger), the choice (selection). This
object feeds these with what happens, and does what they say. One event loop calls in; every loop below is woken by an
event, none polls.

Guarantees: what `submit` took up is accounted for until it has ended; a group is on disk before it is ready, a batch
before it is handed out; `fetch_batch` gives a step the same groups in the same order each time; calls of an older
leader are refused.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from headway.core.ledger import Batch, Ledger, TaskState
from headway.core.selection import Selection, StalenessPolicy, can_be_in_time, mask_stale, select
from headway.core.staleness import StalenessManager
from headway.core.trajectory import Outcome
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, NotFound, StaleVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import group_from_wire, group_to_wire
from headway.v1 import types_pb2 as pb
from services.rollout_controller.dispatcher import BatchTaskDispatcher, Slots, TimedResult
from services.rollout_controller.journal import GroupRecord, JournalStore, Recovered
from services.rollout_controller.rollouts import GroupRunner, RolloutEnd, TaskInput

log = logging.getLogger(__name__)
T = TypeVar("T")


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

    def payloads(self, step: int) -> AsyncIterator[tuple[bytes, dict[int, int]]]: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers of the experiment file that the controller goes by."""

    batch_size: int
    eta: int
    max_concurrent: int
    queue_size: int
    policy: StalenessPolicy = StalenessPolicy.MASK
    max_attempts: int = 3


@dataclass(slots=True)
class StepRecord:
    """A step, as it is shown to people."""

    step: int
    version: PolicyVersion | None = None
    """The version that it made; None: not committed yet."""
    num_groups: int = 0
    waited_s: float = 0.0
    tokens_by_staleness: dict[int, int] = field(default_factory=dict)
    """Gradient-carrying tokens."""
    masked_by_staleness: dict[int, int] = field(default_factory=dict)
    """Tokens that lost their gradient."""
    committed_at: float | None = None
    """Unix seconds."""
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def num_masked(self) -> int:
        return sum(self.masked_by_staleness.values())

    def summary(self) -> dict[str, Any]:
        """The part that is known when the batch is handed out."""
        return {
            "num_groups": self.num_groups,
            "waited_s": self.waited_s,
            "tokens": self.tokens_by_staleness,
            "masked": self.masked_by_staleness,
        }


@dataclass(slots=True)
class Timing:
    """Where the time of rollouts went: sums in seconds over `num` accepted groups."""

    num: int = 0
    pending_s: float = 0.0
    """From submission, or the last failure, to the start: the budget, free slots, servers."""
    rollout_s: float = 0.0
    """From the start to the end of the last sample."""
    generate_s: float = 0.0
    """Of it, in generation (mean over samples)."""
    reward_s: float = 0.0
    """Of it, in rewards (mean over samples)."""
    journal_s: float = 0.0
    """From the end until the group was on disk."""


@dataclass(frozen=True, slots=True)
class Handout:
    """A batch on its way to the trainer."""

    record: StepRecord
    is_replay: bool


class RolloutController:
    """Tasks, budget, running rollouts, ready groups and batches of one run.

    Args:
        settings: What the experiment file says.
        journal: Open, and owned by the caller.
        fleet: The inference servers.
        training: Rolls out tasks to be trained on.
        evaluation: Gives what rolls out the tasks of an evaluation of a version.
        supervisor: Ends the process when a loop of the controller fails.
        wall_clock: Unix seconds, for what is shown to people.
    """

    def __init__(
        self,
        settings: Settings,
        journal: JournalWriter,
        fleet: FleetView,
        training: GroupRunner,
        evaluation: Callable[[PolicyVersion], GroupRunner],
        supervisor: Supervisor,
        waits: Waits,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.waits = waits
        self.incarnation = secrets.token_hex(8)
        self.history: deque[StepRecord] = deque(maxlen=MAX_HISTORY)
        self.timing = Timing()
        self.num_outcomes: Counter[Outcome] = Counter()
        self.fencing_token = 0
        self.forgotten_before = 0
        self.served = -1
        """The newest step that the whole fleet has served; -1: none yet."""
        self._journal = journal
        self._training = training
        self._supervisor = supervisor
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._fetching = asyncio.Lock()
        self._inputs: dict[str, TaskInput] = {}
        self._records: dict[int, StepRecord] = {}
        self._wanted_since: dict[int, float] = {}
        """When the batch of a step was first asked for; an interrupted call asks again."""
        self._is_fresh_for = 0
        self.evaluations = Evaluations(evaluation, fleet, settings, waits)
        self._start_over()

    def _start_over(self) -> None:
        """An empty account, an untouched budget."""
        settings = self.settings
        self.ledger = Ledger(settings.max_attempts)
        self.ledger.serve(max(0, self.served))
        self.budget = StalenessManager(self, settings.max_concurrent, settings.batch_size, settings.eta)
        self.dispatcher: BatchTaskDispatcher[TaskInput, RolloutEnd] = BatchTaskDispatcher(
            settings.queue_size, self._start, self.budget, _is_accepted
        )
        if self.served < 0:
            self.dispatcher.pause()
        self._collecting = self._supervisor.start("collect rollouts", self._collect(self.dispatcher))

    def get_version(self) -> int:
        """The step that counts for the budget: batches of earlier steps are outstanding no more."""
        return self.ledger.served_step

    # ---- life

    async def start(self) -> None:
        """Take up what the journal holds, then begin."""
        recovered = await self._journal.write(lambda store: store.recover())
        self._restore(recovered)
        self._supervisor.start("follow the fleet's version", self._follow_fleet())

    async def close(self) -> None:
        """Cancel what runs; returns when nothing does."""
        self._collecting.cancel()
        await self.dispatcher.close()
        await self.evaluations.close()

    def _restore(self, recovered: Recovered) -> None:
        for task_id in recovered.damaged:
            log.error("the journal's group of task %s was damaged; it has to be submitted again", task_id)
        self.fencing_token = recovered.fencing_token
        for step in recovered.steps:
            self._remember(_record_of(step.step, step.summary, step.record))
            if step.task_ids:
                self.ledger.restore_batch(step.step, step.task_ids, step.is_committed)
            else:
                self.forgotten_before = max(self.forgotten_before, step.step + 1)
                self.ledger.hand_out(step.step, step.summary["num_groups"])
            self.ledger.next_step = max(self.ledger.next_step, step.step + 1)
        for group in recovered.ready:
            self.ledger.restore_ready(group.task_id, group.attempt, group.versions, group.started_at)
            self._inputs[group.task_id] = TaskInput(group.task_id, group.data)
        for state, count in recovered.num_ended.items():
            self.ledger.restore_ended(state, count)
        self._on_change()

    # ---- the trainer calls

    async def begin(self, fencing_token: int, step: int, is_fresh: bool) -> None:
        """A trainer leads from now on, and trains `step` next.

        Raises:
            StaleVersion: A newer leader was seen.
        """
        self._check_leader(fencing_token)
        if is_fresh and self._is_fresh_for != fencing_token:
            self._is_fresh_for = fencing_token
            await self._clear()
        log.info("a trainer leads: fencing token %d, next step %d%s", fencing_token, step, ", afresh" * is_fresh)
        await self._write(lambda store: store.set_meta("fencing_token", str(fencing_token)))

    async def submit(self, tasks: Sequence[TaskInput]) -> int:
        """Take up those of the tasks that are not known; returns how many these are.

        Raises:
            InvalidInput: A task has no id.
        """
        if any(not task.task_id for task in tasks):
            raise InvalidInput("a task has no task_id")
        fresh = [task for task in tasks if task.task_id not in self.ledger.records]
        if not fresh:
            return 0
        ids = [task.task_id for task in fresh]
        ledger = self.ledger
        known, failures = await self._write(lambda store: (store.known(ids), store.failures(ids)))
        if ledger is not self.ledger:
            raise StaleVersion("a new run has begun; submit again")
        taken = [task for task in fresh if task.task_id not in known and self.ledger.submit(task.task_id)]
        names = {task.task_id for task in taken}
        for failure in failures:
            if failure.task_id in names:
                self.ledger.restore_failure(failure)
        for task in taken:
            self._inputs[task.task_id] = task
            self.dispatcher.submit_task_input(task)
        self._on_change()
        return len(taken)

    async def fetch_batch(self, step: int, num_groups: int, fencing_token: int) -> Handout:
        """Compose the batch of a step, or find the one it was given; waits until it is complete.

        Raises:
            StaleVersion: A newer leader was seen, also while waiting.
            InvalidInput: No such batch can ever be complete.
            NotFound: The step's batch has been forgotten.
        """
        self._check_leader(fencing_token)
        self._check_batch(step, num_groups)
        if step not in self.ledger.batches:
            async with self._fetching:
                if step not in self.ledger.batches:
                    return await self._compose(step, num_groups, fencing_token)
        return Handout(self._records[step], is_replay=True)

    async def groups(self, step: int) -> AsyncIterator[pb.Group]:
        """The groups of a step's batch in order, as they are trained on: tokens older than eta carry no gradient.

        Raises:
            JournalBroken: A group does not match its checksum.
        """
        eta, policy = self.settings.eta, self.settings.policy
        async for payload, versions in self._journal.payloads(step):
            group = pb.Group.FromString(payload)
            if policy is not StalenessPolicy.ALLOW and any(step - version > eta for version in versions):
                group = group_to_wire(mask_stale(group_from_wire(group), step, eta)[0])
            yield group

    async def commit(self, step: int, fencing_token: int, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        """A step has consumed its batch and made `version`; or was skipped, and `version` is the one that it
        started from.

        Raises:
            StaleVersion: A newer leader was seen.
            NotFound: The step has no batch.
            InvalidInput: The version is neither of the two.
        """
        self._check_leader(fencing_token)
        if version.step not in (step, step + 1):
            raise InvalidInput(f"step {step} makes version step {step + 1}, not {version.step}")
        if step not in self.ledger.batches:
            self._check_known_commit(step, is_skip=version.step == step)
            return
        record = self._records[step]
        record.version, record.stats, record.committed_at = version, dict(stats), self._wall_clock()
        if version.step == step:
            await self._skip(step)
        else:
            self.ledger.commit(step)
            saved = {"version": list(version), "stats": record.stats, "committed_at": record.committed_at}
            await self._write(lambda store: store.commit(step, saved))

    async def forget_before(self, step: int, fencing_token: int) -> int:
        """A checkpoint at `step` is complete; returns how many groups were dropped.

        Raises:
            StaleVersion: A newer leader was seen.
        """
        self._check_leader(fencing_token)
        count = self.ledger.forget_before(step)
        self.forgotten_before = max(self.forgotten_before, step)
        for old in [known for known in self._records if known < step and known not in self.ledger.batches]:
            del self._records[old]
        await self._write(lambda store: store.forget_before(step))
        return count

    # ---- leaders

    def _check_leader(self, fencing_token: int) -> None:
        if fencing_token < self.fencing_token:
            raise StaleVersion(f"fencing token {fencing_token} is old: a leader with {self.fencing_token} was seen")
        if fencing_token > self.fencing_token:
            self.fencing_token = fencing_token
            self._on_change()

    async def _clear(self) -> None:
        """Drop everything of an earlier run."""
        old = self.dispatcher
        self._collecting.cancel()
        self._inputs.clear()
        self._records.clear()
        self.history.clear()
        self.timing, self.num_outcomes, self.forgotten_before = Timing(), Counter(), 0
        self._start_over()
        await old.close()
        await self._write(lambda store: store.clear())

    # ---- batches

    def _check_batch(self, step: int, num_groups: int) -> None:
        size = self.settings.batch_size
        if not 1 <= num_groups <= size:
            raise InvalidInput(f"{num_groups} groups wanted for step {step}; rollout.consumer_batch_size is {size}")
        if step < self.forgotten_before and step not in self.ledger.batches:
            raise NotFound(
                f"the batch of step {step} was forgotten: a checkpoint at {self.forgotten_before} was said complete"
            )

    async def _compose(self, step: int, num_groups: int, fencing_token: int) -> Handout:
        began = self._wanted_since.setdefault(step, self._loop.time())
        with self.waits.waiting_for(f"{num_groups} ready groups for step {step}"):
            selection = await self._complete_selection(step, num_groups, fencing_token)
        batch = self.ledger.lease(step, selection.chosen)
        record = self._describe(batch, self._loop.time() - began)
        self._wanted_since.clear()
        self._remember(record)
        for task_id in batch.task_ids:
            del self._inputs[task_id]
        self._cancel_late()
        await self._write(lambda store: store.lease(step, batch.task_ids, record.summary()))
        return Handout(record, is_replay=False)

    async def _complete_selection(self, step: int, num_groups: int, fencing_token: int) -> Selection:
        """waits for: enough ready groups     unblocked by: a group that is saved, a rollout that ends, a new leader"""
        while True:
            changed = self._changed
            selection = self._select(step, num_groups)
            self._discard(selection.stale, step)
            if selection.is_complete:
                return selection
            await asyncio.shield(changed)
            self._check_leader(fencing_token)

    def _select(self, step: int, num_groups: int) -> Selection:
        ready = [record.candidate for record in self.ledger.in_state(TaskState.READY)]
        running = [record.oldest for record in self.ledger.in_state(TaskState.RUNNING, TaskState.SAVING)]
        return select(ready, step, num_groups, self.settings.eta, self.settings.policy, running)

    def _discard(self, task_ids: Sequence[str], step: int) -> None:
        """Groups that are too old for this step and all later ones: their tasks are queued again."""
        for task_id in task_ids:
            oldest = self.ledger.records[task_id].oldest
            message = f"made from version step {oldest} on, too old for step {step} with eta {self.settings.eta}"
            self._note_failure(task_id, Outcome.STALE, message)
        if task_ids:
            self._record_write(lambda store: store.discard(task_ids))
            self._on_change()

    def _cancel_late(self) -> None:
        """With `discard`, rollouts whose first tokens are too old for the next step are not worth their end."""
        if self.settings.policy is StalenessPolicy.DISCARD:
            for record in self.ledger.in_state(TaskState.RUNNING):
                if not can_be_in_time(record.started_at, self.ledger.next_step, self.settings.eta):
                    self.dispatcher.cancel(record.task_id)

    def _describe(self, batch: Batch, waited_s: float) -> StepRecord:
        used: Counter[int] = Counter()
        for task_id in batch.task_ids:
            for version, count in self.ledger.records[task_id].versions.items():
                used[batch.step - version] += count
        masks = self.settings.policy is not StalenessPolicy.ALLOW
        masked = {age: count for age, count in used.items() if masks and age > self.settings.eta}
        kept = {age: count for age, count in used.items() if age not in masked}
        return StepRecord(batch.step, None, len(batch.task_ids), waited_s, kept, masked)

    async def _skip(self, step: int) -> None:
        self.ledger.skip(step)
        del self._records[step]
        self._on_change()
        await self._write(lambda store: store.skip(step))

    def _check_known_commit(self, step: int, is_skip: bool) -> None:
        """A commit that comes again is fine; one for a batch that never was is not."""
        is_known = step <= self.ledger.next_step if is_skip else step < self.forgotten_before
        if not is_known:
            raise NotFound(f"no batch was handed out for step {step}")

    def _remember(self, record: StepRecord) -> None:
        self._records[record.step] = record
        self.history.append(record)

    # ---- rollouts

    def _start(self, task: TaskInput) -> Callable[[], Any]:
        attempt = self.ledger.start(task.task_id)
        return partial(self._training.run, task, attempt)

    async def _collect(self, dispatcher: BatchTaskDispatcher[TaskInput, RolloutEnd]) -> None:
        """Account for every rollout that ends.

        consumes: results     waits for: a rollout that ends     produces: groups on their way to the disk,
        tasks queued again
        """
        while True:
            for result in await dispatcher.wait_any(MAX_COLLECTED):
                self._account(result)
            self._on_change()

    def _account(self, result: TimedResult[RolloutEnd]) -> None:
        end = _end_of(result)
        self.num_outcomes[end.outcome] += 1
        if end.outcome is Outcome.ACCEPTED:
            self._save(result, end)
        elif end.outcome is Outcome.REJECTED:
            self.ledger.reject(result.task_id, end.message)
            del self._inputs[result.task_id]
            self._record_write(lambda store: store.end(result.task_id, TaskState.REJECTED, end.message))
        else:
            self._note_failure(result.task_id, end.outcome, end.message)

    def _save(self, result: TimedResult[RolloutEnd], end: RolloutEnd) -> None:
        """Write an accepted group; it is ready when it is on disk."""
        assert end.group is not None
        task_id = result.task_id
        self.ledger.save(task_id, end.versions)
        task = self.ledger.records[task_id]
        row, payload = self._inputs[task_id].data_json, end.group.SerializeToString()
        record = GroupRecord(task_id, task.attempt, task.started_at, dict(end.versions), row, payload)
        saved = self._record_write(lambda store: store.append(record))
        saved.add_done_callback(partial(self._on_saved, self.ledger, result, end))

    def _on_saved(
        self, ledger: Ledger, result: TimedResult[RolloutEnd], end: RolloutEnd, saved: "asyncio.Future[None]"
    ) -> None:
        if saved.cancelled() or saved.exception() is not None or ledger is not self.ledger:
            return
        ledger.ready(result.task_id)
        timing = self.timing
        timing.num += 1
        timing.pending_s += result.started_at - result.enqueued_at
        timing.rollout_s += end.rollout_s
        timing.generate_s += end.generate_s
        timing.reward_s += end.reward_s
        timing.journal_s += self._loop.time() - result.finished_at
        self._on_change()

    def _note_failure(self, task_id: str, outcome: Outcome, message: str) -> None:
        """An attempt came to nothing: queue the task again, or give it up."""
        attempt = self.ledger.records[task_id].attempt
        log.warning("task %s, attempt %d: %s: %s", task_id, attempt, outcome, message)
        if self.ledger.fail(task_id, outcome, message):
            self.dispatcher.submit_task_input(self._inputs[task_id], is_first=True)
            failure = self.ledger.records[task_id].history[-1]
            self._record_write(lambda store: store.fail(failure))
        else:
            del self._inputs[task_id]
            log.error("task %s is quarantined after %d attempts", task_id, attempt)
            self._record_write(lambda store: store.end(task_id, TaskState.QUARANTINED, f"{outcome}: {message}"))

    # ---- what happened wakes what waits

    def _on_change(self) -> None:
        """Count the budget anew, and wake whoever waits for a batch or for capacity."""
        self.budget.rebase(self.ledger.num_outstanding)
        if not self._changed.done():
            self._changed.set_result(None)
        self._changed = self._loop.create_future()
        self.dispatcher.wake()

    async def _follow_fleet(self) -> None:
        """Open the budget whenever the whole fleet serves a newer version.

        waits for: the fleet     unblocked by: a server that becomes ready     produces: capacity
        """
        with self.waits.waiting_for("a server that serves a published version"):
            await self.fleet.wait_for_step(0)
        while True:
            await self.fleet.wait_for_step(self.served + 1)
            self.served = max(self.served + 1, self.fleet.served_step or 0)
            self.ledger.serve(self.served)
            self.dispatcher.resume()
            self._on_change()

    def _record_write(self, operation: Callable[[JournalStore], T]) -> "asyncio.Future[T]":
        """Write without waiting; the process ends when that fails."""
        future = self._journal.write(operation)
        future.add_done_callback(self._fail_if_broken)
        return future

    async def _write(self, operation: Callable[[JournalStore], T]) -> T:
        """Write and wait until it is on disk. The write takes place even when the wait is cancelled."""
        return await asyncio.shield(self._record_write(operation))

    def _fail_if_broken(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._supervisor.start("write the journal", _raise(error))


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


class Evaluations:
    """Rolls out tasks with one pinned version, outside the staleness budget."""

    def __init__(
        self, runner_of: Callable[[PolicyVersion], GroupRunner], fleet: FleetView, settings: Settings, waits: Waits
    ) -> None:
        self._runner_of = runner_of
        self._fleet = fleet
        self._waits = waits
        self._num_streams = 0
        self.history: deque[EvaluationRecord] = deque(maxlen=MAX_HISTORY)
        self.dispatcher: BatchTaskDispatcher[_Evaluation, RolloutEnd] = BatchTaskDispatcher(
            settings.queue_size, self._start, Slots(settings.max_concurrent), _is_accepted
        )

    async def run(
        self, version: PolicyVersion, num_samples: int, tasks: AsyncIterator[TaskInput]
    ) -> AsyncIterator[tuple[str, RolloutEnd]]:
        """Roll out the tasks; yields each one's end as it comes. A token of another version is `evidence_invalid`."""
        if num_samples < 1:
            raise InvalidInput("an evaluation needs num_samples of 1 or more")
        with self._waits.waiting_for(f"all servers to serve {version.label}, for an evaluation"):
            await self._fleet.wait_for_step(version.step)
        self._num_streams += 1
        runner = self._runner_of(version)
        owner, num_open = self._num_streams, 0
        record = EvaluationRecord(version)
        try:
            async for task in tasks:
                one = _Evaluation(f"{owner}/{task.task_id}", task, num_samples, runner)
                self.dispatcher.submit_task_input(one, owner)
                num_open += 1
            while num_open:
                for result in await self.dispatcher.wait_any(MAX_COLLECTED, owner):
                    num_open -= 1
                    end = _pinned(_end_of(result), version)
                    record.add(end)
                    yield result.task_id.partition("/")[2], end
            self.history.append(record)
        finally:
            self.dispatcher.forget(owner)

    async def close(self) -> None:
        await self.dispatcher.close()

    def _start(self, evaluation: "_Evaluation") -> Callable[[], Any]:
        return partial(evaluation.runner.run, evaluation.task, 1, evaluation.num_samples)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    task_id: str
    task: TaskInput
    num_samples: int
    runner: GroupRunner


MAX_HISTORY = 100_000
"""Steps kept for the report."""
MAX_COLLECTED = 1024


def _is_accepted(end: RolloutEnd | None) -> bool:
    return end is not None and end.outcome is Outcome.ACCEPTED


def _end_of(result: TimedResult[RolloutEnd]) -> RolloutEnd:
    if result.data is not None:
        return result.data
    message = "it could no longer be in time" if isinstance(result.error, asyncio.CancelledError) else str(result.error)
    outcome = Outcome.CANCELLED if isinstance(result.error, asyncio.CancelledError) else Outcome.WORKFLOW_ERROR
    return RolloutEnd(outcome, message)


def _pinned(end: RolloutEnd, version: PolicyVersion) -> RolloutEnd:
    others = sorted(step for step in end.versions if step != version.step)
    if not others:
        return end
    return RolloutEnd(
        Outcome.EVIDENCE_INVALID, f"tokens of version step {others[0]} in an evaluation of {version.label}"
    )


def _record_of(step: int, summary: dict[str, Any], record: dict[str, Any]) -> StepRecord:
    return StepRecord(
        step,
        PolicyVersion(*record["version"]) if record else None,
        summary["num_groups"],
        summary["waited_s"],
        {int(age): count for age, count in summary["tokens"].items()},
        {int(age): count for age, count in summary["masked"].items()},
        record.get("committed_at"),
        record.get("stats", {}),
    )


async def _raise(error: BaseException) -> None:
    raise error
