"""The rollout controller as the trainer uses it: tasks in, batches of bounded staleness out.

              submit                                                  fetch_batch(step)
    trainer --------> pending --[budget]--> running --> journal --> ready --------> leased --commit--> consumed
                         ^                     |                      |
                         +----- failed (3x) ---+------- stale --------+

What it decides stands in `headway.core`: the budget (staleness), the account (ledger), the choice (selection). From
the submission to a ready group it is `Production`; this object composes the batches, remembers the steps, and knows who
leads. One event loop calls in; what waits is woken by an event, nothing polls.

Guarantees: what `submit` took up is accounted for until it has ended; a group is on disk before it is ready, a batch
before it is handed out; `fetch_batch` gives a step the same groups in the same order each time; calls of an older
leader are refused.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from headway.core.ledger import Batch, Ledger, TaskState
from headway.core.selection import Selection, StalenessPolicy, mask_stale, select
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, NotFound, StaleVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import group_from_bytes, group_to_wire
from services.rollout_controller.evaluations import Evaluations
from services.rollout_controller.journal_store import Recovered
from services.rollout_controller.production import FleetView, JournalWriter, Production, Writes
from services.rollout_controller.records import Handout, History, Settings, StepRecord
from services.rollout_controller.rollouts import GroupRunner, TaskInput

log = logging.getLogger(__name__)


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
        self.waits = waits
        self.incarnation = secrets.token_hex(8)
        """Changes with each start: what was pending or running before is to be submitted again."""
        self.served: int | None = None
        """The newest step that the whole fleet has served."""
        self._fleet = fleet
        self._journal = journal
        self._writes = Writes(journal, supervisor)
        self.evaluations = Evaluations(evaluation, fleet, settings, waits, self._writes, wall_clock)
        self._is_held = False
        self.on_fresh: Callable[[], None] = lambda: None
        """Called when a new run begins, and everything of an earlier one is dropped."""
        self._training = training
        self._supervisor = supervisor
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._fetching = asyncio.Lock()
        self._fencing_token = 0
        self._is_fresh_for = 0
        """The leader for whom everything was dropped."""
        self._forget_steps()
        self.production = self._new_production()

    def _new_production(self) -> Production:
        production = Production(self.settings, self._training, self._writes, self._supervisor, self._on_change)
        production.hold(self._is_held)
        return production

    def _forget_steps(self) -> None:
        self.history = History()
        self._records: dict[int, StepRecord] = {}
        """Of the steps whose batch is kept."""
        self._forgotten_before = 0
        self._wanted_since: dict[int, float] = {}
        """When the batch of a step was first asked for; a call that was interrupted asks again."""

    @property
    def ledger(self) -> Ledger:
        return self.production.ledger

    # ---- life

    async def start(self) -> None:
        """Take up what the journal holds, then begin."""
        self._restore(await self._writes.done(lambda store: store.recover()))
        self._supervisor.start("follow the fleet's version", self._follow_fleet())

    async def close(self) -> None:
        """Cancel what runs; returns when nothing does."""
        await self.production.close()
        await self.evaluations.close()

    def _restore(self, recovered: Recovered) -> None:
        for task_id in recovered.damaged:
            log.error("the journal's group of task %s was damaged; it has to be submitted again", task_id)
        self._fencing_token = recovered.fencing_token
        for stored in recovered.steps:
            record = StepRecord.stored(stored, self.settings.eta)
            self._remember(record)
            self.history.num_committed += record.version is not None
            if stored.task_ids:
                self.ledger.restore_batch(stored.step, stored.task_ids, stored.is_committed)
            else:
                self._forgotten_before = stored.step + 1
                self.ledger.restore_forgotten(stored.step, stored.summary["num_groups"])
        for group in recovered.ready:
            self.production.restore(group)
        for state, count in recovered.num_ended.items():
            self.ledger.restore_ended(state, count)
        self.evaluations.restore(recovered.evaluations)
        self._on_change()

    async def _follow_fleet(self) -> None:
        """Open the budget whenever the whole fleet serves a newer version.

        waits for: the fleet     unblocked by: a server that becomes ready     produces: capacity
        """
        with self.waits.waiting_for("a server that serves a published version"):
            await self._fleet.wait_for_step(0)
        while True:
            at_least = 0 if self.served is None else self.served + 1
            await self._fleet.wait_for_step(at_least)
            self.served = max(at_least, self._fleet.served_step or 0)
            self.production.serve(self.served)
            self._on_change()

    def _on_change(self) -> None:
        """Something has become ready, has ended, or is trained on: wake whoever waits for a batch or for capacity."""
        self.production.recount()
        if not self._changed.done():
            self._changed.set_result(None)
        self._changed = self._loop.create_future()

    # ---- what people change

    def hold(self, is_held: bool) -> None:
        """Start no rollouts until told otherwise; those that run end, and are used."""
        self._is_held = is_held
        self.production.hold(is_held)

    @property
    def is_held(self) -> bool:
        return self._is_held

    def change(self, eta: int, max_concurrent: int) -> None:
        """Go by other numbers: at once for what starts, from the next batch on for what is trained on."""
        self.settings = replace(self.settings, eta=eta, max_concurrent=max_concurrent)
        self.production.change(self.settings)
        self.evaluations.resize(max_concurrent)
        self._on_change()

    async def remember(self, key: str, value: str) -> None:
        """Keep a value beside the groups; returns when it is on disk."""
        await self._writes.done(lambda store: store.set_meta(key, value))

    async def remembered(self, key: str) -> str:
        """The value that was kept, also by an earlier process; empty: none."""
        return await self._writes.done(lambda store: store.get_meta(key, ""))

    # ---- who leads

    async def begin(self, fencing_token: int, step: int, is_fresh: bool) -> None:
        """A trainer leads from now on, and trains `step` next. Idempotent.

        Raises:
            StaleVersion: A newer leader was seen.
        """
        self._check_leader(fencing_token)
        if is_fresh and self._is_fresh_for != fencing_token:
            self._is_fresh_for = fencing_token
            await self._start_afresh()
        log.info("a trainer leads: fencing token %d, next step %d%s", fencing_token, step, ", afresh" * is_fresh)
        await self._writes.done(lambda store: store.set_meta("fencing_token", str(fencing_token)))

    async def _start_afresh(self) -> None:
        """Drop everything of an earlier run."""
        cleared = self._writes.begin(lambda store: store.clear())
        self.on_fresh()
        old, self.production = self.production, self._new_production()
        self._forget_steps()
        self.evaluations.forget()
        if self.served is not None:
            self.production.serve(self.served)
        self._on_change()
        await old.close()
        await asyncio.shield(cleared)

    def _check_leader(self, fencing_token: int) -> None:
        if fencing_token < self._fencing_token:
            raise StaleVersion(f"fencing token {fencing_token} is old: a leader with {self._fencing_token} was seen")
        if fencing_token > self._fencing_token:
            self._fencing_token = fencing_token
            self._on_change()

    # ---- tasks

    async def submit(self, tasks: Sequence[TaskInput]) -> int:
        """Take up those of the tasks that are not known; returns how many these are.

        Raises:
            InvalidInput: A task has no id.
            StaleVersion: A new run has begun meanwhile.
        """
        if any(not task.task_id for task in tasks):
            raise InvalidInput("a task has no task_id")
        production = self.production
        unseen = [task for task in tasks if task.task_id not in production.ledger.records]
        if not unseen:
            return 0
        ids = [task.task_id for task in unseen]
        known, failures = await self._writes.done(lambda store: (store.known(ids), store.failures(ids)))
        if production is not self.production:
            raise StaleVersion("a new run has begun; submit again")
        num_new = production.submit([task for task in unseen if task.task_id not in known], failures)
        self._on_change()
        return num_new

    # ---- batches

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

    async def groups(self, step: int) -> AsyncIterator[list[bytes]]:
        """The groups of a step's batch in order, serialized, some at a time, as they are trained on: tokens older than
        eta carry no gradient. A group without such tokens is the bytes that the journal holds.

        Raises:
            JournalBroken: A group does not match its checksum.
        """
        eta, policy = self._records[step].eta, self.settings.policy
        is_bounded = policy is not StalenessPolicy.ALLOW
        async for page in self._journal.pages(step, self._records[step].record_ids):
            yield [
                _masked(payload, step, eta) if is_bounded and step - min(versions, default=step) > eta else payload
                for payload, versions in page
            ]

    async def commit(self, step: int, fencing_token: int, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        """A step has consumed its batch and made `version`, the one after it; the same step's: it was skipped.

        Raises:
            StaleVersion: A newer leader was seen.
            NotFound: The step has no batch.
            InvalidInput: The version is neither of the two.
        """
        self._check_leader(fencing_token)
        if version.step not in (step, step + 1):
            raise InvalidInput(f"step {step} makes version step {step + 1}, not {version.step}")
        if step not in self.ledger.batches:
            self._check_committed(step, is_skip=version.step == step)
            return
        record = self._records[step]
        record.version, record.stats, record.committed_at = version, dict(stats), self._wall_clock()
        if record.is_skipped:
            await self._skip(step)
            return
        self.history.num_committed += self.ledger.commit(step)
        committed = self._writes.begin(lambda store: store.commit(step, record.at_commit()))
        if not self.settings.keeps_batches:
            await self.forget_before(step, fencing_token)
        await asyncio.shield(committed)

    async def forget_before(self, step: int, fencing_token: int) -> int:
        """A checkpoint at `step` is complete; returns how many groups were dropped.

        Raises:
            StaleVersion: A newer leader was seen.
        """
        self._check_leader(fencing_token)
        num_groups = self.ledger.forget_before(step)
        self._forgotten_before = max(self._forgotten_before, step)
        self._records = {known: record for known, record in self._records.items() if known in self.ledger.batches}
        await self._writes.done(lambda store: store.forget_before(step))
        return num_groups

    def _check_batch(self, step: int, num_groups: int) -> None:
        size, forgotten = self.settings.batch_size, self._forgotten_before
        if not 1 <= num_groups <= size:
            raise InvalidInput(f"{num_groups} groups wanted for step {step}; rollout.consumer_batch_size is {size}")
        if step < forgotten and step not in self.ledger.batches:
            raise NotFound(f"the batch of step {step} was forgotten: a checkpoint at {forgotten} was said complete")

    def _check_committed(self, step: int, is_skip: bool) -> None:
        """A commit that comes again is fine; one for a batch that never was is not."""
        is_known = step <= self.ledger.next_step if is_skip else step < self._forgotten_before
        if not is_known:
            raise NotFound(f"no batch was handed out for step {step}")

    async def _compose(self, step: int, num_groups: int, fencing_token: int) -> Handout:
        since = self._wanted_since.setdefault(step, self._loop.time())
        with self.waits.waiting_for(f"{num_groups} ready groups for step {step}"):
            selection = await self._complete_selection(step, num_groups, fencing_token)
        batch = self.ledger.lease(step, selection.chosen)
        record = self._describe(batch, waited_s=self._loop.time() - since)
        self._remember(record)
        self._wanted_since.pop(step)
        self.production.release(batch.task_ids)
        if self.settings.policy is StalenessPolicy.DISCARD:
            self.production.cancel_late()
        leased = self._writes.done(lambda store: store.lease(step, batch.task_ids, record.at_hand_out()))
        record.record_ids = await leased
        return Handout(record, is_replay=False)

    async def _complete_selection(self, step: int, num_groups: int, fencing_token: int) -> Selection:
        """waits for: enough ready groups     unblocked by: a group that is saved, a rollout that ends, a new leader"""
        while True:
            changed = self._changed
            selection = self._select(step, num_groups)
            if selection.stale:
                self.production.discard_stale(selection.stale, step)
                self._on_change()
            if selection.is_complete:
                return selection
            await asyncio.shield(changed)
            self._check_leader(fencing_token)

    def _select(self, step: int, num_groups: int) -> Selection:
        ready = [record.candidate for record in self.ledger.in_state(TaskState.READY)]
        running = [record.oldest for record in self.ledger.in_state(TaskState.RUNNING, TaskState.SAVING)]
        return select(ready, step, num_groups, self.settings.eta, self.settings.policy, running)

    def _describe(self, batch: Batch, waited_s: float) -> StepRecord:
        ages: Counter[int] = Counter()
        for task_id in batch.task_ids:
            for version, count in self.ledger.records[task_id].versions.items():
                ages[batch.step - version] += count
        masks = self.settings.policy is not StalenessPolicy.ALLOW
        masked = {age: count for age, count in ages.items() if masks and age > self.settings.eta}
        kept = {age: count for age, count in ages.items() if age not in masked}
        return StepRecord(batch.step, len(batch.task_ids), waited_s, self.settings.eta, kept, masked)

    async def _skip(self, step: int) -> None:
        self.ledger.skip(step)
        del self._records[step]
        self._on_change()
        await self._writes.done(lambda store: store.skip(step))

    def _remember(self, record: StepRecord) -> None:
        self._records[record.step] = record
        self.history.add(record)

    async def all_steps(self) -> list[StepRecord]:
        """Every step that was given a batch, from the journal, but for the skipped ones."""
        eta = self.settings.eta
        return [StepRecord.stored(stored, eta) for stored in await self._writes.done(lambda store: list(store.steps()))]


def _masked(payload: bytes, step: int, eta: int) -> bytes:
    """The group without gradient from tokens older than eta."""
    masked, _ = mask_stale(group_from_bytes(payload), step, eta)
    return group_to_wire(masked).SerializeToString()
