"""Leadership of an office: the oldest candidate leads, and its election is written down before anybody hears of it.

    enter     a name below the office, under a lease:   {office}/{lease}, created at revision r
    elected   when no older candidate is left, and in one transaction with its own existence:
              term := term + 1, fencing token := r

Guarantee: terms and fencing tokens of an office only grow, and one token is one leadership. That a leader *believes* to
lead guarantees nothing: whoever acts for the office shows the token where the act takes effect (see versions.py).
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from services.name_resolve.feed import Feed
from services.name_resolve.keys import (
    NAMES,
    TERMS,
    Leadership,
    Record,
    clean,
    key_of,
    leadership_of,
    record_of,
    to_bytes,
)
from services.name_resolve.store import CreatedAt, Guard, Item, LeaseLapsed, Put, Store, Unchanged


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a candidate stands."""

    leadership: Leadership | None
    """Its own, when it leads."""
    leader: str
    """Who leads, or is first in line."""


class Elections:
    """The offices in a store."""

    def __init__(self, store: Store, feed: Feed, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._feed = feed
        self._wall_clock = wall_clock

    async def enter(self, office: str, candidate: str, lease_id: int) -> None:
        """Stand in line under a lease."""
        record = Record(candidate, owner=f"{lease_id:x}", registered_at=self._wall_clock())
        await self._store.transact([], [Put(_candidate_key(office, lease_id), to_bytes(record), lease_id)])

    async def stand(self, office: str, lease_id: int) -> AsyncGenerator[Standing, None]:
        """How the candidate stands, whenever that changes; ends only by an error.

        Waits for: the candidates before it to go; unblocked by: their leases, or their names, being gone.

        Raises:
            LeaseLapsed: The candidate's own name is gone.
        """
        mine, last = _candidate_key(office, lease_id), None
        async with aclosing(self._feed.follow(key_of(NAMES, clean(office)), 0)) as news:
            async for _ in news:
                standing = await self._standing(office, mine)
                if standing != last:
                    yield standing
                last = standing

    async def _standing(self, office: str, mine: str) -> Standing:
        view = await self._store.below(key_of(NAMES, clean(office)))
        candidates = [item for item in view.items if item.key == _candidate_key(office, item.lease_id)]
        line = sorted(candidates, key=lambda item: item.create_revision)
        own = next((item for item in line if item.key == mine), None)
        if own is None:
            raise LeaseLapsed(f"the candidature for {office} has lapsed")
        leader = record_of(line[0]).value
        return Standing(await self._take(office, own) if line[0] is own else None, leader)

    async def _take(self, office: str, own: Item) -> Leadership:
        """Write the election down, unless that is done already."""
        term_key = key_of(TERMS, clean(office))
        while True:
            view = await self._store.get(term_key)
            before = leadership_of(view.items[0]) if view.items else Leadership(0, 0, "")
            if before.fencing_token == own.create_revision:
                return before
            elected = Leadership(before.term + 1, own.create_revision, record_of(own).value)
            guards: list[Guard] = [
                CreatedAt(own.key, own.create_revision),
                Unchanged(term_key, view.items[0].revision if view.items else 0),
            ]
            outcome = await self._store.transact(guards, [Put(term_key, to_bytes(elected))])
            if outcome.committed:
                return elected
            if not any(item.key == own.key and item.create_revision == own.create_revision for item in outcome.found):
                raise LeaseLapsed(f"the candidature for {office} has lapsed")


def _candidate_key(office: str, lease_id: int) -> str:
    return key_of(NAMES, f"{clean(office)}/{lease_id:016x}")
