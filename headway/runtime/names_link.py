"""The way to name-resolve: one of several replicas, another one when it fails, until a deadline.

    call or stream -> the current replica -> fails -> the next one, after a pause that grows

Only what may be made twice is sent through here: reads, registrations by their owner, publications of one version.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from headway.errors import InvalidInput, TimedOut, Unavailable
from headway.runtime.grpc_client import connect, translating
from headway.runtime.names_session import Session
from headway.v1.name_resolve_pb2_grpc import NameResolveStub

if TYPE_CHECKING:  # in the type stubs only
    from headway.v1.name_resolve_pb2_grpc import NameResolveAsyncStub

log = logging.getLogger(__name__)

T = TypeVar("T")
ATTEMPT_S = 6.0
"""A little more than the service gives its store."""
BACKOFF_S = (0.05, 1.0)
TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNKNOWN,
)


class Backoff:
    """Pauses that grow, with some chance in them."""

    def __init__(self) -> None:
        self._pause_s = BACKOFF_S[0]

    def reset(self) -> None:
        self._pause_s = BACKOFF_S[0]

    def next_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, BACKOFF_S[1])
        return pause_s * random.uniform(0.5, 1.0)


class Link:
    """Channels to every replica, and the one in use."""

    def __init__(self, addresses: str) -> None:
        """
        Args:
            addresses: "host:port", several separated by commas.

        Raises:
            InvalidInput: There is none.
        """
        self._addresses = [address.strip() for address in addresses.split(",") if address.strip()]
        if not self._addresses:
            raise InvalidInput("the address of name-resolve is missing: host:port[,host:port]")
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[NameResolveAsyncStub] = []
        self._sessions: list[Session] = []
        self._current = random.randrange(len(self._addresses))

    async def open(self) -> None:
        self._channels = [connect(address) for address in self._addresses]
        self._stubs = [NameResolveStub(channel) for channel in self._channels]
        self._sessions = [Session(stub) for stub in self._stubs]

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()
        for channel in self._channels:
            await channel.close()

    @property
    def stub(self) -> NameResolveAsyncStub:
        """The replica in use."""
        if not self._stubs:
            raise RuntimeError("a NameClient is used with `async with`")
        return self._stubs[self._current]

    def leave(self, stub: NameResolveAsyncStub) -> None:
        """Use the next replica from now on, if it is still this one that is in use."""
        if self.stub is stub:
            self._current = (self._current + 1) % len(self._stubs)

    async def call(self, what: str, make: Callable[[Session, float], Awaitable[T]], timeout_s: float) -> T:
        """Make a call until it is answered.

        Args:
            what: For the error's message.
            make: Makes the call, given the session with a replica and the time for this attempt.
            timeout_s: For all attempts together, seconds.

        Raises:
            HeadwayError: What the service answered; `Unavailable` or `TimedOut` when nothing did in time.
        """
        clock = asyncio.get_running_loop().time
        deadline, backoff = clock() + timeout_s, Backoff()
        while True:
            stub = self.stub
            try:
                with translating(f"{what} at name-resolve {self._addresses[self._current]}"):
                    return await make(self._sessions[self._current], max(0.05, min(ATTEMPT_S, deadline - clock())))
            except (Unavailable, TimedOut):
                pause_s = backoff.next_s()
                if clock() + pause_s > deadline:
                    raise
                self.leave(stub)
            await asyncio.sleep(pause_s)

    async def stream(
        self, what: str, make: Callable[[NameResolveAsyncStub], AsyncIterable[Any]]
    ) -> AsyncGenerator[Any, None]:
        """The replies of a stream that is opened again, by `make`, whenever it breaks; for ever.

        Raises:
            HeadwayError: What the service answered, where trying again would not help.
        """
        backoff, is_down = Backoff(), False
        while True:
            stub = self.stub
            stream: Any = make(stub)
            try:
                async for reply in stream:
                    backoff.reset()
                    is_down = False
                    yield reply
            except grpc.aio.AioRpcError as error:
                if error.code() not in TRANSIENT:
                    with translating(what):
                        raise
                level = logging.DEBUG if is_down else logging.WARNING
                log.log(level, "%s: %s: %s; trying again", what, error.code().name, error.details())
                is_down = True
            finally:
                stream.cancel()
            self.leave(stub)
            await asyncio.sleep(backoff.next_s())
