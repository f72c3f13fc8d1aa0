"""Names: registering, keeping, resolving and watching them, the same over every store.

Guarantee: of several that register one absent name without `replace`, one succeeds; a name under a lease is there for
as long as the lease is kept, and no longer.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from headway.errors import AlreadyExists, InvalidInput, NotFound, TimedOut
from services.name_resolve.feed import Feed
from services.name_resolve.keys import (
    MAX_VALUE_BYTES,
    NAMES,
    VERSIONS,
    Record,
    clean,
    key_of,
    name_of,
    record_of,
    to_bytes,
)
from services.name_resolve.store import Delete, Item, LeaseLapsed, News, Put, Store, Unchanged, View

MIN_TTL_S, MAX_TTL_S = 0.5, 24 * 3600.0


class Names:
    """The names in a store."""

    def __init__(self, store: Store, feed: Feed, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._feed = feed
        self._wall_clock = wall_clock

    async def register(
        self, name: str, record: Record, *, ttl_s: float = 0.0, lease_id: int = 0, replace: bool = False
    ) -> tuple[int, int]:
        """Write a name, under a lease where a time to live or a lease is given; the lease and the revision.

        Raises:
            AlreadyExists: The name is another owner's, and `replace` is false.
            LeaseLapsed: The lease is not there.
        """
        key = key_of(NAMES, clean(name))
        if len(record.value) > MAX_VALUE_BYTES:
            raise InvalidInput(f"the value of {name} is longer than {MAX_VALUE_BYTES} bytes")
        granted = await self.grant(ttl_s) if ttl_s and not lease_id else 0
        put = Put(key, to_bytes(record), lease_id or granted)
        try:
            revision = await self._put(put, record, replace)
        except AlreadyExists:
            if granted:
                await self._store.revoke(granted)
            raise
        return put.lease_id, revision

    async def grant(self, ttl_s: float) -> int:
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"a time to live of {ttl_s} s is not between {MIN_TTL_S} and {MAX_TTL_S:.0f} s")
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease_id: int) -> float:
        """Seconds that a lease has from now; 0: it has lapsed."""
        try:
            return await self._store.keep_alive(lease_id)
        except LeaseLapsed:
            return 0.0

    async def _put(self, put: Put, record: Record, replace: bool) -> int:
        """Put unconditionally, or if the name is absent, or if it is the same owner's as it was read."""
        if replace:
            return (await self._store.transact([], [put])).revision
        seen = 0
        while True:
            outcome = await self._store.transact([Unchanged(put.key, seen)], [put])
            if outcome.committed:
                return outcome.revision
            if outcome.found:
                self._check_owner(outcome.found[0], record)
            seen = outcome.found[0].revision if outcome.found else 0

    def _check_owner(self, item: Item, record: Record) -> None:
        held = record_of(item)
        if not record.owner or held.owner != record.owner:
            age_s = self._wall_clock() - held.registered_at
            raise AlreadyExists(f"{name_of(NAMES, item.key)} is taken: {held.value!r}, registered {age_s:.0f} s ago")

    async def deregister(self, name: str) -> int:
        """Delete one name.

        Raises:
            NotFound: It is not there.
        """
        outcome = await self._store.transact([], [Delete(key_of(NAMES, clean(name)))])
        if not outcome.num_deleted:
            raise NotFound(f"{name} is not registered")
        return outcome.num_deleted

    async def clear(self, prefix: str, with_versions: bool) -> int:
        """Delete a prefix and everything below it; how many names and versions."""
        prefix = clean(prefix, may_be_empty=True)
        spaces = (NAMES, VERSIONS) if with_versions else (NAMES,)
        outcomes = [await self._store.transact([], [Delete(key_of(space, prefix), below=True)]) for space in spaces]
        return sum(outcome.num_deleted for outcome in outcomes)

    async def revoke(self, lease_id: int) -> None:
        await self._store.revoke(lease_id)

    async def get(self, name: str) -> View:
        """One name's item.

        Raises:
            NotFound: It is not there.
        """
        view = await self._store.get(key_of(NAMES, clean(name)))
        if not view.items:
            raise NotFound(f"{name} is not registered")
        return view

    async def below(self, prefix: str) -> View:
        """Everything at and below a prefix, in the order of the names."""
        return await self._store.below(key_of(NAMES, clean(prefix, may_be_empty=True)))

    async def wait(self, prefix: str, min_entries: int, wait_s: float) -> View:
        """Wait until there are at least so many names at or below a prefix.

        Raises:
            TimedOut: There were not, in time; the message says how many there were.
        """
        num_seen = 0
        key = key_of(NAMES, clean(prefix, may_be_empty=True))
        try:
            async with asyncio.timeout(wait_s), aclosing(self._feed.follow(key, 0)) as news:
                async for change in news:
                    view = change if isinstance(change, View) else await self._store.below(key)
                    num_seen = len(view.items)
                    if num_seen >= min_entries:
                        return view
        except TimeoutError:
            pass
        raise TimedOut(f"waited {wait_s:.0f} s for {min_entries} names at {prefix or '/'}; there are {num_seen}")

    async def watch(self, prefix: str, after: int) -> News:
        """A view, then every change in order; with `after`, only the changes after that revision."""
        async with aclosing(self._feed.follow(key_of(NAMES, clean(prefix, may_be_empty=True)), after)) as changes:
            async for news in changes:
                yield news
