"""Keep leases alive: one stream for all of a process's leases, each asked for three times in its time to live.

    leases, the one that is due first -> KeepAlive stream -> seconds left: `kept_until` moves on
                                                          -> gone: `on_lapsed()`

Guarantee: `kept_until` counts from before the request was sent, so that the lease lives at least until then.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from headway.runtime.names_link import Backoff, Link
from headway.v1 import name_resolve_pb2 as pb

log = logging.getLogger(__name__)

REPLY_S = 6.0


@dataclass(eq=False)
class Lease:
    """A lease that is kept."""

    lease_id: int
    ttl_s: float
    on_lapsed: Callable[[], None]
    kept_until: float
    """On the event loop's clock; the lease lives at least until then."""
    due_at: float = 0.0
    renewed: asyncio.Event = field(default_factory=asyncio.Event)


class Keeper:
    """Keeps the leases that are added, until they are removed or lapse."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases: dict[int, Lease] = {}
        self._added = asyncio.Event()

    def add(self, lease_id: int, ttl_s: float, asked_at: float, on_lapsed: Callable[[], None]) -> Lease:
        """Keep a lease; `asked_at` is when it was asked for, on the loop's clock."""
        lease = Lease(lease_id, ttl_s, on_lapsed, asked_at + ttl_s, asked_at + ttl_s / 3)
        self._leases[lease_id] = lease
        self._added.set()
        return lease

    def remove(self, lease: Lease) -> None:
        if self._leases.get(lease.lease_id) is lease:
            del self._leases[lease.lease_id]

    async def run(self) -> None:
        """Waits for: the next lease that is due; unblocked by: time, or a new lease."""
        backoff, is_down = Backoff(), False
        while True:
            await self._next_due()
            stub = self._link.stub
            stream: Any = stub.KeepAlive()
            try:
                while True:
                    await self._keep(stream, await self._next_due())
                    backoff.reset()
                    is_down = False
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, EOFError) as error:
                level = logging.DEBUG if is_down else logging.WARNING
                log.log(level, "leases are not kept at the moment: %s; trying again", _text(error))
                is_down = True
            finally:
                stream.cancel()
            self._link.leave(stub)
            await asyncio.sleep(backoff.next_s())

    async def _next_due(self) -> Lease:
        loop = asyncio.get_running_loop()
        while True:
            self._added.clear()
            first = min(self._leases.values(), key=lambda lease: lease.due_at, default=None)
            if first is not None and first.due_at <= loop.time():
                return first
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if first is None else first.due_at):
                    await self._added.wait()

    async def _keep(self, stream: Any, lease: Lease) -> None:
        sent_at = asyncio.get_running_loop().time()
        async with asyncio.timeout(min(REPLY_S, max(1.0, lease.ttl_s / 2))):
            await stream.write(pb.KeepAliveRequest(lease_id=lease.lease_id))
            reply = await stream.read()
        if reply is grpc.aio.EOF:
            raise EOFError("name-resolve ended the stream")
        if self._leases.get(lease.lease_id) is not lease:
            return
        if reply.ttl_s <= 0:
            self.remove(lease)
            lease.on_lapsed()
            return
        lease.kept_until = sent_at + reply.ttl_s
        lease.due_at = sent_at + reply.ttl_s / 3
        lease.renewed.set()


def _text(error: BaseException) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no reply in time"
