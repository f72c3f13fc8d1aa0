"""Decide how many rollouts may start, so that what is started can still be trained on in time.

    pending -> [capacity > 0] -> running -> held (ready or handed out) -> trained on
                    ^                          |                            |
                    +------- rejected ---------+ discarded                  |
                    +------- the fleet serves the version that was made ----+

The rule, for B groups a step and an allowed staleness of eta steps (arXiv:2505.24298):

    capacity = min(max_concurrent - running, (eta + 1) * B - outstanding)
    outstanding = running + accepted - trained on

Between two re-bases the groups trained on are counted as AReaL counts them, B for each version, so that the second
term is its `(eta + version + 1) * B - (accepted + running)`. `rebase` says what is really out: call it whenever a
step is released, a group is discarded or a run recovers. Then rejections, batches of another size and restarts cannot
inflate the budget.

Guarantee: with one re-base for every such event, no more than (eta + 1) * B groups are out, and no counter is ever
negative. What is consumed out of order can still be too old: `headway.core.selection` applies the rule again at
consumption.

Pure: no clock, no lock, no I/O; one asyncio loop calls in.
"""

from dataclasses import dataclass, replace
from typing import Protocol


class VersionProvider(Protocol):
    """Whoever knows the step of the policy version that generates now."""

    def get_version(self) -> int: ...


@dataclass(slots=True)
class RolloutStat:
    """How many rollouts are where, and how many ended how since the start."""

    enqueued: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0


class StalenessManager:
    """The admission budget; the names are AReaL's.

    Example:
        >>> class Served:
        ...     def get_version(self): return 3
        >>> manager = StalenessManager(Served(), max_concurrent_rollouts=64, consumer_batch_size=8, max_staleness=2)
        >>> manager.on_version_recovered(3)
        >>> manager.get_capacity()
        24
    """

    def __init__(
        self,
        version_provider: VersionProvider,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
    ) -> None:
        self.version_provider = version_provider
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.consumer_batch_size = consumer_batch_size
        self.max_staleness = max_staleness
        self._stat = RolloutStat()
        self._base_version = 0
        self._num_consumed_at_base = 0

    def get_pending_limit(self) -> int:
        """How many groups may be outstanding at once: (eta + 1) * B."""
        return (self.max_staleness + 1) * self._batch_size

    def get_capacity(self) -> int:
        """How many rollouts may start now; negative when more are out than the budget allows."""
        return min(self.concurrency_capacity, self.staleness_capacity)

    @property
    def concurrency_capacity(self) -> int:
        """What `max_concurrent_rollouts` leaves."""
        return max(1, self.max_concurrent_rollouts) - self._stat.running

    @property
    def staleness_capacity(self) -> int:
        """What the allowed staleness leaves."""
        return self.get_pending_limit() - self.num_outstanding

    @property
    def num_outstanding(self) -> int:
        """Groups started and not yet trained on."""
        num_versions = self.version_provider.get_version() - self._base_version
        num_consumed = self._num_consumed_at_base + num_versions * self._batch_size
        return self._stat.running + self._stat.accepted - num_consumed

    def on_rollout_enqueued(self) -> None:
        self._stat.enqueued += 1

    def on_rollout_submitted(self) -> None:
        """A rollout that was enqueued starts.

        Raises:
            ValueError: None is enqueued.
        """
        self._require(self._stat.enqueued, "started", "enqueued")
        self._stat.enqueued -= 1
        self._stat.running += 1

    def on_rollout_accepted(self) -> None:
        """A running rollout has become a group to train on.

        Raises:
            ValueError: None is running.
        """
        self._require(self._stat.running, "accepted", "running")
        self._stat.running -= 1
        self._stat.accepted += 1

    def on_rollout_rejected(self) -> None:
        """A running rollout has ended without a group.

        Raises:
            ValueError: None is running.
        """
        self._require(self._stat.running, "rejected", "running")
        self._stat.running -= 1
        self._stat.rejected += 1

    def rebase(self, num_outstanding: int) -> None:
        """Count from what is really out: groups running, being saved, ready, or handed out and not yet trained on."""
        self._base_version = self.version_provider.get_version()
        self._num_consumed_at_base = self._stat.running + self._stat.accepted - num_outstanding

    def on_version_recovered(self, version: int) -> None:
        """A run goes on at `version` with nothing held: the budget is one of a fresh run."""
        self._base_version = version
        self._num_consumed_at_base = self._stat.accepted

    def get_stats(self) -> RolloutStat:
        return replace(self._stat)

    @property
    def _batch_size(self) -> int:
        return max(1, self.consumer_batch_size)

    @staticmethod
    def _require(count: int, what: str, state: str) -> None:
        if count <= 0:
            raise ValueError(f"a rollout was {what}, but none is {state}")
