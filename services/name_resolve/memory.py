"""The store inside the one name-resolve process: everything is forgotten when it ends. For tests and small runs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from services.name_resolve.store import Guard, News, Outcome, Put, Store, View, Write
from services.name_resolve.tree import Leases, Tree


class MemoryStore:
    """A Tree, a table of leases, and a condition that watches wait on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        born = time.time_ns() // 1000  # a later process goes on above the revisions of an earlier one
        self._tree = Tree(born, forgotten=born)
        self._leases = Leases()
        self._changed = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        yield self
        if self._expiry is not None:
            self._expiry.cancel()

    async def get(self, *keys: str) -> View:
        self._expire()
        return self._tree.get(*keys)

    async def below(self, prefix: str) -> View:
        self._expire()
        return self._tree.below(prefix)

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        self._expire()
        for write in writes:
            if isinstance(write, Put):
                self._leases.check(write.lease_id, self._clock())
        before = self._tree.revision
        outcome = self._tree.transact(guards, writes)
        self._tell(before)
        return outcome

    async def grant(self, ttl_s: float) -> int:
        lease_id = self._leases.grant(ttl_s, self._clock())
        self._expire()
        return lease_id

    async def keep_alive(self, lease_id: int) -> float:
        self._expire()
        return self._leases.keep_alive(lease_id, self._clock())

    async def revoke(self, lease_id: int) -> None:
        self._expire()
        self._leases.remove(lease_id)
        before = self._tree.revision
        self._tree.drop_leases({lease_id})
        self._tell(before)

    async def watch(self, prefix: str, after: int) -> News:
        """See `Store.watch`. Waits for: the next revision; unblocked by: any write, or a lease that lapses."""
        revision = after
        while True:
            changed = self._changed
            news = self._tree.changes_after(revision, prefix)
            if news is None:
                await changed.wait()
                continue
            revision = news.revision
            if isinstance(news, View) or news.changes:
                yield news

    def _tell(self, before: int) -> None:
        if self._tree.revision != before:
            self._changed.set()
            self._changed = asyncio.Event()

    def _expire(self) -> None:
        """Drop the leases that have lapsed, and come back when the next one will."""
        before = self._tree.revision
        lapsed = self._leases.lapsed(self._clock())
        for lease_id in lapsed:
            self._leases.remove(lease_id)
        if lapsed:
            self._tree.drop_leases(lapsed)
        self._tell(before)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._leases.lapses_at:
            in_s = min(self._leases.lapses_at.values()) - self._clock()
            self._expiry = asyncio.get_running_loop().call_later(max(in_s, 0) + 0.001, self._expire)
