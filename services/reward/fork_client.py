"""The service's side of the fork server: start it, ask for workers, hear which have ended."""

import asyncio
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headway.errors import InvalidInput, TimedOut
from services.reward.fork_server import MAX_DATAGRAM_BYTES

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0


class ForkClient:
    """One fork server.

    Callbacks: `on_forked(number, pid)`, `on_not_forked(number, why)`, `on_ended(pid, wait status)`, `on_gone()`.
    """

    def __init__(
        self,
        on_forked: Callable[[int, int], None],
        on_not_forked: Callable[[int, str], None],
        on_ended: Callable[[int, int], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._on_forked, self._on_not_forked = on_forked, on_not_forked
        self._on_ended, self._on_gone = on_ended, on_gone
        self._control: socket.socket | None = None
        self._orders: deque[tuple[bytes, Sequence[int]]] = deque()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._control is not None

    async def start(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Start the process; returns "ready": what it knows of each function, "layers": what isolates, and "missing".

        Raises:
            InvalidInput: A function cannot be loaded.
            TimedOut: It did not get ready in time.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        command = (sys.executable, "-m", "services.reward.fork_server", str(theirs.fileno()), json.dumps(settings))
        self._process = await asyncio.create_subprocess_exec(
            *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await asyncio.get_running_loop().sock_recv(ours, MAX_DATAGRAM_BYTES)
        except TimeoutError as error:
            await self.stop()
            raise TimedOut(
                f"the fork server did not load the reward functions within {START_TIMEOUT_S:.0f} s"
            ) from error
        described: dict[str, Any] = json.loads(first or '{"failed": "the fork server ended at its start"}')
        if "failed" in described:
            await self.stop()
            raise InvalidInput(described["failed"])
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)
        return described

    def fork(self, number: int, descriptors: Sequence[int]) -> None:
        """Ask for a worker that owns these descriptors; they are closed here."""
        self._order({"do": "fork", "number": number}, descriptors)

    def kill(self, pid: int) -> None:
        self._order({"do": "kill", "pid": pid})

    def _order(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        self._orders.append((json.dumps(order).encode(), descriptors))
        self._send_orders()

    def _send_orders(self) -> None:
        """Send what waits; where the fork server is behind, go on when it has caught up."""
        loop = asyncio.get_running_loop()
        while self._orders and self._control is not None:
            packed, descriptors = self._orders[0]
            try:
                socket.send_fds(self._control, [packed], descriptors)
            except BlockingIOError:
                loop.add_writer(self._control.fileno(), self._send_orders)
                return
            except OSError:
                break  # it is gone; the end of its socket says so too
            self._orders.popleft()
            close_all(descriptors)
        if self._control is not None:
            loop.remove_writer(self._control.fileno())

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close()
                self._on_gone()
                return
            self._dispatch(json.loads(data))

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            self._on_forked(message["forked"], message["pid"])
        elif "not_forked" in message:
            self._on_not_forked(message["not_forked"], message["why"])
        else:
            self._on_ended(message["ended"], message["status"])

    def _close(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            asyncio.get_running_loop().remove_writer(self._control.fileno())
            self._control.close()
            self._control = None
        while self._orders:
            close_all(self._orders.popleft()[1])

    async def stop(self) -> None:
        """End the fork server and with it every worker; returns when it is gone."""
        self._close()
        if self._process is not None:
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            self._process = None


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
