"""One registered name: written, kept under a lease, written again when the lease was lost.

Guarantee: until it is closed the name is there, or somebody else's (`lost`), or being registered again.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from headway.errors import AlreadyExists, HeadwayError, NotFound
from headway.runtime.names_keeper import Keeper, Lease
from headway.runtime.names_link import Backoff, Link
from headway.v1 import name_resolve_pb2 as pb

log = logging.getLogger(__name__)

TIMEOUT_S = 20.0
CLOSE_S = 2.0


class Registration:
    """A name of this process's, kept until it is closed."""

    def __init__(self, link: Link, keeper: Keeper, request: pb.RegisterRequest) -> None:
        self._link, self._keeper = link, keeper
        self._request = request
        self._lease: Lease | None = None
        self._again: asyncio.Task[None] | None = None
        self._is_closed = False
        self.lost = asyncio.Event()
        """Set when the name lapsed and somebody else has taken it meanwhile (never with `replace`)."""

    @property
    def name(self) -> str:
        return self._request.name

    async def open(self) -> None:
        """Register.

        Raises:
            AlreadyExists: Somebody has the name, and `replace` is false.
        """
        await self._write(0)

    async def update(self, *, value: str | None = None, metadata: Mapping[str, str] | None = None) -> None:
        """Change the value, the metadata, or both."""
        if value is not None:
            self._request.value = value
        if metadata is not None:
            self._request.metadata.clear()
            self._request.metadata.update(metadata)
        try:
            await self._write(self._lease.lease_id if self._lease else 0)
        except NotFound:  # the lease has just lapsed
            await self._write(0)

    async def close(self) -> None:
        """Take the name back; one that somebody else has replaced stays."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait({self._again})
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._keeper.remove(lease)
        request = pb.DeregisterRequest(lease_id=lease.lease_id)
        with suppress(HeadwayError):  # the end of the lease does the same later
            await self._link.call(
                f"deregister {self.name}", lambda stub, timeout_s: stub.Deregister(request, timeout=timeout_s), CLOSE_S
            )

    async def _write(self, lease_id: int) -> None:
        """Register, under a lease that is there or a new one."""
        request = pb.RegisterRequest()
        request.CopyFrom(self._request)
        request.lease_id = lease_id
        asked_at = asyncio.get_running_loop().time()
        reply: pb.RegisterReply = await self._link.call(
            f"register {self.name}", lambda stub, timeout_s: stub.Register(request, timeout=timeout_s), TIMEOUT_S
        )
        if reply.lease_id and reply.lease_id != lease_id:
            self._hold(reply.lease_id, asked_at)

    def _hold(self, lease_id: int, asked_at: float) -> None:
        if self._lease is not None:
            self._keeper.remove(self._lease)
        self._lease = self._keeper.add(lease_id, self._request.ttl_s, asked_at, self._on_lapsed)

    def _on_lapsed(self) -> None:
        self._lease = None
        if not self._is_closed:
            self._again = asyncio.create_task(self._register_again(), name=f"register {self.name} again")

    async def _register_again(self) -> None:
        """Waits for: name-resolve to take the name; ends when it is closed or somebody else's."""
        backoff = Backoff()
        while not self._is_closed:
            try:
                await self._write(0)
            except AlreadyExists as error:
                log.error("%s was lost: %s", self.name, error)
                self.lost.set()
                return
            except HeadwayError as error:
                log.warning("%s is not registered at the moment: %s; trying again", self.name, error)
                await asyncio.sleep(backoff.next_s())
            else:
                log.info("%s is registered again after its lease had lapsed", self.name)
                return
