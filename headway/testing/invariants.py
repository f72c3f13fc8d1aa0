"""The promises of the design, checked on a simulated run; a broken one is raised by its number.

| I1  | an acknowledged group is ready, leased, consumed, or discarded with a reason | every turn, and after a restart |
| I2  | it is in at most one train step of the surviving lineage                     | every batch                     |
| I3  | no token older than eta carries gradient (all policies but `allow`)          | every batch                     |
| I4  | no more than (eta + 1) * B groups are out, no more than max_concurrent run   | every turn                      |
| I6  | each token carries the version that made it                                  | every batch                     |
| I8  | at rest nothing runs, and nothing is leased                                  | the end                         |
| I9  | conservation                                                                 | every turn                      |
| I10 | groups are whole, and as many as asked for; a replay is the same batch       | every batch                     |
| I12 | poison never becomes a group; nothing is given up before the third attempt   | the end                         |
| I15 | after the last fault a new step comes within `Scenario.recovery_limit_s`     | the end                         |

A turn is one turn of the event loop: all callbacks that were ready have run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.core.ledger import Ledger, TaskState
from headway.core.trajectory import NO_VERSION, Group
from headway.runtime.wire import group_from_wire
from headway.testing.model_fleet import version_of
from headway.testing.scenario import Scenario
from headway.v1 import types_pb2 as pb

OPEN = (TaskState.PENDING, TaskState.RUNNING, TaskState.SAVING)
MADE = (TaskState.SAVING, TaskState.READY, TaskState.LEASED)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Findings:
    """What a run was like."""

    seed: int
    seconds: float = 0.0
    """Virtual."""
    num_steps: int = 0
    num_replayed: int = 0
    num_used_tokens: int = 0
    num_masked_tokens: int = 0
    oldest: int = 0
    """Greatest staleness of a token that carried gradient."""
    num_quarantined: int = 0
    num_discarded: int = 0
    committed_at: list[float] = field(default_factory=list)


class Invariants:
    """Watches one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.findings = Findings(scenario.seed)
        self.last_fault_s = 0.0
        """When the last fault was over."""
        self._scenario = scenario
        self._acknowledged: set[str] = set()
        self._handed_out: dict[int, list[bytes]] = {}
        self._batches: dict[int, tuple[int, bool]] = {}
        """Size of each batch that was handed out, and whether it was seen committed."""
        self._seen: object = None

    # ---- after every turn of the event loop

    def check_turn(self, ledger: Ledger, served: int, running: int) -> None:
        """`running`: groups whose samples run now. Looks only when something has changed."""
        seen = (id(ledger), tuple(ledger.counts.items()), ledger.num_submitted, served, running)
        if seen == self._seen:
            return
        self._seen = seen
        ledger.check()
        out = (
            running
            + ledger.counts[TaskState.SAVING]
            + ledger.counts[TaskState.READY]
            + self._handed_out_since(ledger, served)
        )
        if out > self._scenario.limit:
            raise Broken(f"I4: {out} groups are out, {self._scenario.limit} may be")
        if running > min(self._scenario.max_concurrent, ledger.counts[TaskState.RUNNING]):
            raise Broken(f"I4: {running} tasks run, {self._scenario.max_concurrent} may")
        self._follow_acknowledged(ledger)

    def _handed_out_since(self, ledger: Ledger, served: int) -> int:
        """Groups of batches whose version is not served; counted here, from what was seen to be handed out."""
        for step, batch in ledger.batches.items():
            self._batches[step] = (len(batch.task_ids), batch.is_committed)
        for step in self._batches.keys() - ledger.batches.keys():
            if not self._batches[step][1]:
                del self._batches[step]  # skipped, or its lease was lost in a kill
        return sum(size for step, (size, _) in self._batches.items() if step >= served)

    def _follow_acknowledged(self, ledger: Ledger) -> None:
        ready = {record.task_id for record in ledger.in_state(TaskState.READY)}
        for task_id in self._acknowledged - ready:
            record = ledger.records.get(task_id)
            if record is not None and record.state in OPEN and not record.history:
                raise Broken(f"I1: the acknowledged group of {task_id} was discarded without a reason")
        self._acknowledged = ready

    def check_recovered(self, ledger: Ledger, known: set[str]) -> None:
        """After a restart; `known` are the tasks that the disk knows."""
        lost = self._acknowledged - known
        if lost:
            raise Broken(f"I1: acknowledged groups are lost: {sorted(lost)}")
        ready = {record.task_id for record in ledger.in_state(TaskState.READY)}
        leased = {record.task_id for record in ledger.in_state(TaskState.LEASED)}
        if torn := self._acknowledged & (known - ready - leased) & ledger.records.keys():
            raise Broken(f"I1: acknowledged groups are neither ready nor leased: {sorted(torn)}")

    @property
    def acknowledged(self) -> set[str]:
        """Groups that were ready when last looked at."""
        return self._acknowledged

    # ---- on every batch

    def check_batch(self, step: int, groups: Sequence[pb.Group], lineage: Mapping[int, Sequence[str]]) -> None:
        """`lineage`: what the trainer consumed at which step."""
        sent = [group.SerializeToString(deterministic=True) for group in groups]
        if self._handed_out.setdefault(step, sent) != sent:
            raise Broken(f"I10: step {step} was given another batch than before")
        if len(groups) != self._scenario.batch_size:
            raise Broken(f"I10: step {step} was given {len(groups)} groups")
        used = {task_id: at for at, task_ids in lineage.items() for task_id in task_ids}
        for group in map(group_from_wire, groups):
            if group.task_id in used:
                raise Broken(f"I2: {group.task_id} is trained on at steps {used[group.task_id]} and {step}")
            self._check_group(step, group)

    def _check_group(self, step: int, group: Group) -> None:
        scenario, findings = self._scenario, self.findings
        if len(group.trajectories) != scenario.num_samples:
            raise Broken(f"I10: {group.task_id} has {len(group.trajectories)} samples")
        for trajectory in group.trajectories:
            made = trajectory.versions != NO_VERSION
            if [version_of(int(token)) for token in trajectory.input_ids[made]] != trajectory.versions[made].tolist():
                raise Broken(f"I6: a token of {group.task_id} carries another version than the one that made it")
            ages = step - trajectory.versions[trajectory.loss_mask]
            oldest = int(ages.max(initial=0))
            if oldest > scenario.eta and scenario.policy != "allow":
                raise Broken(f"I3: a token of {group.task_id} is {oldest} stale at step {step}")
            findings.oldest = max(findings.oldest, oldest)
            findings.num_used_tokens += len(ages)
            findings.num_masked_tokens += int(made.sum()) - len(ages)

    def forget_batch(self, step: int) -> None:
        """The step was skipped: it will be given another batch."""
        self._handed_out.pop(step, None)

    # ---- at the end

    def check_end(self, ledger: Ledger, num_requests: int) -> None:
        """After the controller has closed; `num_requests` still run on the servers."""
        if num_requests or ledger.counts[TaskState.LEASED]:
            raise Broken(f"I8: {num_requests} requests still run, {ledger.counts[TaskState.LEASED]} groups are leased")
        for task_id, history in ledger.quarantined.items():
            if history[-1].attempt != ledger.max_attempts:
                raise Broken(f"I12: {task_id} was given up after attempt {history[-1].attempt}")
        for record in ledger.in_state(*MADE):
            if self._scenario.is_poison(int(record.task_id.split("/")[1])):
                raise Broken(f"I12: {record.task_id} is poison, and {record.state}")
        self._check_recovery_time()
        self.findings.num_quarantined = len(ledger.quarantined)
        self.findings.num_discarded = sum(ledger.num_discarded.values())

    def _check_recovery_time(self) -> None:
        later = [at for at in self.findings.committed_at if at > self.last_fault_s]
        if self.last_fault_s and later and later[0] - self.last_fault_s > self._scenario.recovery_limit_s:
            raise Broken(f"I15: {later[0] - self.last_fault_s:.1f} s from the last fault to the next step")
