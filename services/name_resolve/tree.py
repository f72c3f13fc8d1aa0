"""The state behind the stores that are not etcd: keys, leases, revisions, and the changes that are still remembered.

Guarantee: applied to the same transactions in the same order, two trees are equal. Pure: no clock, no I/O; times are
arguments, in seconds on whatever clock the caller keeps to.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.name_resolve.store import (
    Change,
    Changes,
    Delete,
    Guard,
    Item,
    LeaseLapsed,
    Outcome,
    Put,
    Unchanged,
    View,
    Write,
)

NUM_REMEMBERED = 1000
"""Revisions that a watch can go back to."""


@dataclass
class Tree:
    """Keys by name, the newest revision, and the changes of the last revisions, oldest first."""

    revision: int = 1
    items: dict[str, Item] = field(default_factory=dict)
    history: deque[Changes] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    forgotten: int = 1
    """Changes up to this revision are not remembered."""

    def get(self, *keys: str) -> View:
        return View(tuple(self.items[key] for key in keys if key in self.items), self.revision)

    def copy(self) -> "Tree":
        """One that can go its own way."""
        return Tree(self.revision, dict(self.items), self.history.copy(), self.forgotten)

    def below(self, prefix: str) -> View:
        items = sorted((item for item in self.items.values() if item.key.startswith(prefix)), key=lambda item: item.key)
        return View(tuple(items), self.revision)

    def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        """See `Store.transact`; whether a lease exists is for the caller to know."""
        if not all(self._holds(guard) for guard in guards):
            found = [self.items[guard.key] for guard in guards if guard.key in self.items]
            return Outcome(False, self.revision, found=tuple(found))
        revision = self.revision + 1
        changes = [change for write in writes for change in self._changes_of(write, revision)]
        if changes:
            self._apply(Changes(tuple(changes), revision))
        return Outcome(True, self.revision, num_deleted=sum(change.item is None for change in changes))

    def drop_leases(self, lease_ids: Collection[int]) -> None:
        """Delete the keys under some leases, in one revision."""
        keys = [item.key for item in self.items.values() if item.lease_id in lease_ids]
        self.transact([], [Delete(key) for key in sorted(keys)])

    def changes_after(self, revision: int, prefix: str) -> View | Changes | None:
        """What a watch that stands at `revision` has to see next; None: nothing is new."""
        if revision >= self.revision:
            return None
        if revision < self.forgotten:
            return self.below(prefix)
        new = [changes for changes in self.history if changes.revision > revision]
        matching = [change for changes in new for change in changes.changes if change.key.startswith(prefix)]
        return Changes(tuple(matching), self.revision)

    def _holds(self, guard: Guard) -> bool:
        item = self.items.get(guard.key)
        if isinstance(guard, Unchanged):
            return (item.revision if item else 0) == guard.revision
        return item is not None and item.create_revision == guard.revision

    def _changes_of(self, write: Write, revision: int) -> list[Change]:
        if isinstance(write, Put):
            before = self.items.get(write.key)
            created = before.create_revision if before else revision
            return [Change(write.key, Item(write.key, write.value, revision, created, write.lease_id), revision)]
        if write.below:
            return [Change(item.key, None, revision) for item in self.below(write.key).items]
        return [Change(write.key, None, revision)] if write.key in self.items else []

    def _apply(self, changes: Changes) -> None:
        if len(self.history) == self.history.maxlen:
            self.forgotten = self.history[0].revision
        self.history.append(changes)
        self.revision = changes.revision
        for change in changes.changes:
            if change.item is None:
                del self.items[change.key]
            else:
                self.items[change.key] = change.item


@dataclass
class Leases:
    """Leases by id: how long each lasts, and when it lapses."""

    next_id: int = 1
    ttl_s: dict[int, float] = field(default_factory=dict)
    lapses_at: dict[int, float] = field(default_factory=dict)

    def grant(self, ttl_s: float, now: float) -> int:
        lease_id, self.next_id = self.next_id, self.next_id + 1
        self.ttl_s[lease_id] = ttl_s
        self.lapses_at[lease_id] = now + ttl_s
        return lease_id

    def keep_alive(self, lease_id: int, now: float) -> float:
        """Start the lease's time anew; how long that is.

        Raises:
            LeaseLapsed: Too late.
        """
        self.check(lease_id, now)
        self.lapses_at[lease_id] = now + self.ttl_s[lease_id]
        return self.ttl_s[lease_id]

    def check(self, lease_id: int, now: float) -> None:
        """Raises LeaseLapsed unless the lease (0: none) is alive."""
        if lease_id and self.lapses_at.get(lease_id, -1.0) < now:
            raise LeaseLapsed(f"lease {lease_id:x} has lapsed")

    def remove(self, lease_id: int) -> None:
        self.ttl_s.pop(lease_id, None)
        self.lapses_at.pop(lease_id, None)

    def lapsed(self, now: float) -> list[int]:
        return [lease_id for lease_id, at in self.lapses_at.items() if at < now]
