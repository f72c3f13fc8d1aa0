"""What the controller remembers of settings, steps and time: plain data, and its form in the journal."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from headway.core.selection import StalenessPolicy
from headway.core.version import PolicyVersion
from services.rollout_controller.journal_store import StoredStep

MAX_RECENT = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers of the experiment file that the controller goes by."""

    batch_size: int
    eta: int
    max_concurrent: int
    queue_size: int
    policy: StalenessPolicy = StalenessPolicy.MASK
    max_attempts: int = 3
    keeps_batches: bool = True
    """Whether a trainer may come back to a committed step. If not, its batch is dropped when the next one commits."""


@dataclass(slots=True)
class StepRecord:
    """A step, as it is shown to people."""

    step: int
    num_groups: int = 0
    waited_s: float = 0.0
    eta: int = 0
    """The bound under which its batch was composed."""
    tokens_by_staleness: dict[int, int] = field(default_factory=dict)
    """Gradient-carrying tokens."""
    masked_by_staleness: dict[int, int] = field(default_factory=dict)
    """Tokens that lost their gradient."""
    version: PolicyVersion | None = None
    """The version that it made; None: not committed yet."""
    committed_at: float | None = None
    """Unix seconds."""
    stats: dict[str, float] = field(default_factory=dict)
    record_ids: list[int] = field(default_factory=list)
    """Of its groups in the journal, in order, once its batch is on disk; empty: to be asked for."""

    @property
    def num_masked(self) -> int:
        return sum(self.masked_by_staleness.values())

    @property
    def made_step(self) -> int:
        """Completed steps of the version that it made; -1: it is not committed."""
        return -1 if self.version is None else self.version.step

    @property
    def is_skipped(self) -> bool:
        """It made no version."""
        return self.version is not None and self.version.step == self.step

    def at_hand_out(self) -> dict[str, Any]:
        """What is known when the batch is handed out, for the journal."""
        tokens, masked = self.tokens_by_staleness, self.masked_by_staleness
        known = {"num_groups": self.num_groups, "waited_s": self.waited_s, "eta": self.eta}
        return known | {"tokens": tokens, "masked": masked}

    def at_commit(self) -> dict[str, Any]:
        """What the commit adds, for the journal."""
        version = None if self.version is None else list(self.version)
        return {"version": version, "stats": self.stats, "committed_at": self.committed_at}

    @classmethod
    def stored(cls, stored: StoredStep, eta: int) -> "StepRecord":
        """As the journal kept it; `eta` is what it says nothing of."""
        summary, record = stored.summary, stored.record
        return cls(
            stored.step,
            summary["num_groups"],
            summary["waited_s"],
            summary.get("eta", eta),
            {int(age): count for age, count in summary["tokens"].items()},
            {int(age): count for age, count in summary["masked"].items()},
            PolicyVersion(*record["version"]) if record else None,
            record.get("committed_at"),
            record.get("stats", {}),
        )


class History:
    """The steps of the run: the last `MAX_RECENT` in memory, sums over all of them. The journal has them all."""

    def __init__(self) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=MAX_RECENT)
        self.num_committed = 0
        self.waited_s = 0.0
        """How long all batches were asked for and not ready; a trainer asks ahead, so it need not have waited."""
        self.tokens_by_staleness: Counter[int] = Counter()
        self.masked_by_staleness: Counter[int] = Counter()

    def add(self, record: StepRecord) -> None:
        """A batch was handed out."""
        self.recent.append(record)
        self.waited_s += record.waited_s
        self.tokens_by_staleness.update(record.tokens_by_staleness)
        self.masked_by_staleness.update(record.masked_by_staleness)

    @property
    def last_committed(self) -> StepRecord | None:
        return next((record for record in reversed(self.recent) if record.version is not None), None)


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
