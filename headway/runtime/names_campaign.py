"""Standing for leadership: a stream to name-resolve, and a lease that shows that this process is alive.

    stand -> waiting -> elected(fencing token, term) -> lost, or left
               ^  |
               +--+ the candidature lapsed before the election: stand again

Guarantee: `lost` is set before the lease can have lapsed unnoticed: when name-resolve says so, and when it has not been
heard from for the lease's time to live, by this process's own clock. What was begun before is fenced by the token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.errors import HeadwayError, NotFound, TimedOut
from headway.runtime.names_keeper import Keeper, Lease
from headway.runtime.names_link import Link
from headway.v1 import name_resolve_pb2 as pb

if TYPE_CHECKING:  # in the type stubs only
    from headway.v1.name_resolve_pb2_grpc import NameResolveAsyncStub

log = logging.getLogger(__name__)

GIVE_UP_S = 2.0


@dataclass(frozen=True)
class Leadership:
    """What the leader of an office holds."""

    fencing_token: int
    """Grows with each leadership; shown wherever the leader acts."""
    term: int
    """1 for the first leader, then one more for each."""
    lost: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Set when this leadership is over: stop acting for the office."""


class Candidature:
    """One process's attempts to lead one office."""

    def __init__(self, link: Link, keeper: Keeper, office: str, candidate: str, ttl_s: float) -> None:
        self._link, self._keeper = link, keeper
        self._office, self._candidate, self._ttl_s = office, candidate, ttl_s
        self._lease: Lease | None = None
        self._asked_at = 0.0
        self._leader = ""
        self._leadership: Leadership | None = None
        self._is_elected = asyncio.Event()

    @asynccontextmanager
    async def held(self, timeout_s: float | None) -> AsyncIterator[Leadership]:
        """Lead for as long as the block runs."""
        task = asyncio.create_task(self._stand(), name=f"stand for {self._office}")
        watchdog = asyncio.create_task(self._watch_own_lease(), name=f"lease of {self._office}")
        try:
            yield await self._elected(task, timeout_s)
        finally:
            for running in (task, watchdog):
                running.cancel()
            await asyncio.gather(task, watchdog, return_exceptions=True)
            await self._give_up()

    async def _elected(self, task: asyncio.Task[None], timeout_s: float | None) -> Leadership:
        """Waits for: election; unblocked by: the stream's reply.

        Raises:
            TimedOut: Somebody else still leads; the message says who.
        """
        waiting = asyncio.ensure_future(self._is_elected.wait())
        await asyncio.wait({waiting, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._leadership is not None:
            return self._leadership
        if task.done():
            task.result()
        raise TimedOut(
            f"{self._candidate} was not elected to {self._office} in {timeout_s} s: {self._leader or 'nobody'} leads"
        )

    async def _stand(self) -> None:
        """Stand until elected, then until leadership is lost.

        Raises:
            HeadwayError: Name-resolve refuses the candidature.
        """
        while self._leadership is None:
            try:
                async with aclosing(self._link.stream(f"campaign for {self._office}", self._open)) as replies:
                    async for reply in replies:
                        self._on_reply(reply)
            except NotFound:
                log.warning("the candidature of %s for %s has lapsed", self._candidate, self._office)
                self._drop_lease()
        self._lose("name-resolve ended it")

    def _open(self, stub: NameResolveAsyncStub) -> AsyncIterable[pb.CampaignReply]:
        """Stand, or go on standing under the lease.

        Raises:
            NotFound: There was an election, and its lease is gone: that was that.
        """
        if self._leadership is not None and self._lease is None:
            raise NotFound(f"the leadership of {self._office} is over")
        self._asked_at = asyncio.get_running_loop().time()
        lease_id = self._lease.lease_id if self._lease else 0
        return stub.Campaign(
            pb.CampaignRequest(name=self._office, candidate=self._candidate, ttl_s=self._ttl_s, lease_id=lease_id)
        )

    def _on_reply(self, reply: pb.CampaignReply) -> None:
        if self._lease is None:
            self._lease = self._keeper.add(reply.lease_id, self._ttl_s, self._asked_at, self._on_lapsed)
        if not reply.is_leader and reply.leader != self._leader:
            log.info("%s waits for leadership of %s; %s leads", self._candidate, self._office, reply.leader)
        self._leader = reply.leader
        if reply.is_leader and self._leadership is None:
            self._leadership = Leadership(reply.fencing_token, reply.term)
            self._is_elected.set()

    def _on_lapsed(self) -> None:
        self._lease = None
        self._lose("its lease has lapsed")

    def _drop_lease(self) -> None:
        if self._lease is not None:
            self._keeper.remove(self._lease)
            self._lease = None

    def _lose(self, why: str) -> None:
        if self._leadership is not None and not self._leadership.lost.is_set():
            log.warning("%s has lost the leadership of %s: %s", self._candidate, self._office, why)
            self._leadership.lost.set()

    async def _watch_own_lease(self) -> None:
        """Waits for: the time until which the lease was last known to be kept; unblocked by: the clock."""
        await self._is_elected.wait()
        loop = asyncio.get_running_loop()
        while (lease := self._lease) is not None and loop.time() < lease.kept_until:  # noqa: ASYNC110 - waits for the clock
            await asyncio.sleep(lease.kept_until - loop.time())
        self._lose("the lease could not be kept in time")
        await self._give_up()  # else a late success could keep an office that nobody fills

    async def _give_up(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._keeper.remove(lease)
        request = pb.DeregisterRequest(lease_id=lease.lease_id)
        with suppress(HeadwayError):  # the end of the stream, or of the lease, does the same later
            await self._link.call(
                f"give up {self._office}",
                lambda stub, timeout_s: stub.Deregister(request, timeout=timeout_s),
                GIVE_UP_S,
            )
