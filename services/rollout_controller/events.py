"""The status as a stream of server-sent events: one whenever something has changed, at most two a second.

    status --every PERIOD_S, while somebody listens--> changed? --> one slot for each listener --> its connection

Guarantee: a listener that reads slowly gets the newest status and misses those in between; it holds one event, and no
more than `MAX_LISTENERS` are served. Streams end when the service does, with an event `end`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from headway.errors import Overloaded
from services.rollout_controller.status import ControllerStatus

PERIOD_S = 0.5
HEARTBEAT_S = 10.0
MAX_LISTENERS = 64
MOVING = {"uptime_s"}
"""Changes by time alone."""
END = b"event: end\ndata: {}\n\n"
HEARTBEAT = b": still here\n\n"


class Listener:
    """One connection's slot."""

    def __init__(self) -> None:
        self._event: bytes | None = None
        self._filled = asyncio.Event()
        self.has_ended = False

    def put(self, event: bytes) -> None:
        """Give it an event, in place of one that was not taken."""
        self._event = event
        self._filled.set()

    def end(self) -> None:
        self.has_ended = True
        self._filled.set()

    async def take(self) -> bytes:
        """The next event, or a heartbeat when there is none for a while; empty: it has ended."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._filled.wait()
        except TimeoutError:
            return HEARTBEAT
        event, self._event = self._event, None
        if event is not None:
            self._filled.clear()
            if self.has_ended:
                self._filled.set()
        return event or b""


class StatusFeed:
    """Tells listeners the status.

    Args:
        status: The status now.
    """

    def __init__(self, status: Callable[[], ControllerStatus]) -> None:
        self._status = status
        self._listeners: set[Listener] = set()
        self._first = asyncio.Event()
        self._last: dict[str, Any] = {}
        self._number = 0
        self._is_closed = False

    async def run(self) -> None:
        """Look at the status while anybody listens, for ever.

        waits for: a listener     unblocked by: `listen`     produces: events
        """
        while True:
            await self._first.wait()
            self._look()
            await asyncio.sleep(PERIOD_S)

    def close(self) -> None:
        """The service ends: end every stream."""
        self._is_closed = True
        for listener in self._listeners:
            listener.end()

    def listen(self) -> AsyncIterator[bytes]:
        """The stream of one connection, the status now first.

        Raises:
            Overloaded: Too many listen.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} connections listen already")
        return self._stream()

    async def _stream(self) -> AsyncIterator[bytes]:
        listener = Listener()
        listener.put(self._encode(self._status()))
        if self._is_closed:
            listener.end()
        self._listeners.add(listener)
        self._first.set()
        try:
            while event := await listener.take():
                yield event
            yield END
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._first.clear()

    def _look(self) -> None:
        status = self._status()
        known = _without_time(status)
        if known != self._last:
            self._last = known
            event = self._encode(status)
            for listener in self._listeners:
                listener.put(event)

    def _encode(self, status: ControllerStatus) -> bytes:
        self._number += 1
        return f"id: {self._number}\nevent: status\ndata: {status.model_dump_json()}\n\n".encode()


def _without_time(value: Any) -> Any:
    """What of a status changes only when something happens: no `..._s` that grows by itself."""
    if isinstance(value, ControllerStatus):
        return _without_time(value.model_dump(exclude=MOVING))
    if isinstance(value, dict):
        return {name: _without_time(one) for name, one in value.items() if not str(name).endswith("_s")}
    return [_without_time(one) for one in value] if isinstance(value, list) else value
