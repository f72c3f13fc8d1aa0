"""What the service asks of a store: small values under keys, guarded transactions, leases, and a watch that can resume.

    service (names, versions, leadership)  ->  Store  <-  etcd | a shared folder | a Ray actor | memory

What the service guarantees rests on four promises, to which `tests/contract/test_names_store.py` holds each store:

    1. One order: every transaction that took effect has its own revision, and revisions only grow.
    2. A transaction takes effect whole or not at all, and only when its guards hold at that moment.
    3. A lease that nobody keeps alive lapses, and takes its keys with it; one that is kept does not.
    4. A watch gives whole revisions in order, none twice, none left out; where that is no longer possible, a snapshot.

A key ends in "/", so that the prefix "a/trial1/" is itself and what is below it, and never "a/trial10/".
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from headway.errors import NotFound


class LeaseLapsed(NotFound):
    """The lease is not there any more; its keys are gone."""


@dataclass(frozen=True, slots=True)
class Item:
    """A key as it is stored."""

    key: str
    value: bytes
    revision: int
    """Of its last change."""
    create_revision: int
    """Of its creation; a deleted key that is put again has a new one."""
    lease_id: int = 0
    """0: stays until deleted."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key that was put (`item`), or is gone (None)."""

    key: str
    item: Item | None
    revision: int


@dataclass(frozen=True, slots=True)
class View:
    """What was there at one revision, in the order of the keys."""

    items: tuple[Item, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Every change of one or more whole revisions; `revision` is the last one's."""

    changes: tuple[Change, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while the key's last change is `revision`; 0: while the key is absent."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Holds while the key exists and was created at `revision`."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or with `below` every key that begins with it."""

    key: str
    below: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a transaction."""

    committed: bool
    revision: int
    num_deleted: int = 0
    found: tuple[Item, ...] = ()
    """When a guard did not hold: what the guarded keys were at that moment, absent ones left out."""


Guard = Unchanged | CreatedAt
Write = Put | Delete
News = AsyncGenerator[View | Changes, None]
"""What a watch gives; close it with `aclosing`."""


class Store(Protocol):
    """A backend.

    Every call ends within the store's own deadline with `Unavailable`. After that a transaction may or may not have
    taken effect: it is never made twice behind the caller's back.
    """

    def open(self) -> AbstractAsyncContextManager["Store"]:
        """Connect; the block's end lets go of everything but what is stored."""
        ...

    async def get(self, *keys: str) -> View:
        """The items at these keys, absent ones left out, at one revision; linearizable."""
        ...

    async def below(self, prefix: str) -> View:
        """All items whose key begins with `prefix`; linearizable."""
        ...

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        """Make all writes in one revision, if all guards hold. No key may be written twice.

        Raises:
            LeaseLapsed: A `Put` names a lease that is not there.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """Make a lease; its id. The store may round the time up to what it can keep."""
        ...

    async def keep_alive(self, lease_id: int) -> float:
        """Start the lease's time anew; seconds until it lapses.

        Raises:
            LeaseLapsed: Too late.
        """
        ...

    async def revoke(self, lease_id: int) -> None:
        """End the lease now and delete its keys. A lease that is not there is no error."""
        ...

    def watch(self, prefix: str, after: int) -> News:
        """Every change below `prefix` after revision `after`, as it happens, for ever; survives reconnects.

        Where `after` is older than what the store remembers: a view first, then the changes after that.
        """
        ...
