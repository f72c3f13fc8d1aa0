"""A TCP proxy that breaks: what networks and dying machines do to connections, without root and without tc.

async with FaultProxy("127.0.0.1", 30000) as proxy:      # clients use proxy.port
    proxy.freeze()      # bytes stop, connections stay open: a stopped process, a lost route
    proxy.heal()
    proxy.cut()         # every open connection is reset: a killed process, a restarted middlebox
    proxy.refuse()      # and no new ones, until heal()
    proxy.cut_after(1000, "to_client")   # each connection, after so many more bytes
    proxy.delay_s = 0.2
"""

import asyncio
import socket
import struct
from types import TracebackType
from typing import Literal, Self

Direction = Literal["to_server", "to_client"]
CHUNK_BYTES = 65_536
RESET = struct.pack("ii", 1, 0)


class FaultProxy:
    """Forwards connections to one address."""

    def __init__(self, host: str, port: int) -> None:
        self.delay_s = 0.0
        """Added to each chunk, in each direction."""
        self.port = 0
        self.num_connections = 0
        """Accepted so far."""
        self._target = (host, port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._budget: tuple[Direction, int] | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def freeze(self) -> None:
        """Let nothing pass; connections stay open, new ones are accepted and say nothing."""
        self._flows.clear()

    def refuse(self) -> None:
        """Reset what is open, and every new connection."""
        self._refuses = True
        self.cut()

    def heal(self) -> None:
        """Be a good proxy again. What was frozen goes on."""
        self._refuses, self._budget, self.delay_s = False, None, 0.0
        self._flows.set()

    def cut(self) -> None:
        """Reset every open connection."""
        for task, writers in self._connections.items():
            for writer in writers:
                _reset(writer)
            task.cancel()

    def cut_after(self, num_bytes: int, direction: Direction) -> None:
        """Reset each connection once it has carried so many more bytes in a direction; until heal()."""
        self._budget = (direction, num_bytes)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        if self._refuses or task is None:
            _reset(writer)
            return
        writers = self._connections[task] = [writer]
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            writers.append(server_writer)
            pumps = {
                asyncio.create_task(self._pump(reader, server_writer, "to_server")),
                asyncio.create_task(self._pump(server_reader, writer, "to_client")),
            }
            await _first_of(pumps)
        except (OSError, asyncio.CancelledError):
            pass  # the target is gone, or the connection was cut on purpose
        finally:
            for open_writer in self._connections.pop(task):
                open_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        """Forward one direction until it ends, breaks, or has used up its budget."""
        carried = 0
        while chunk := await reader.read(CHUNK_BYTES):
            await asyncio.sleep(self.delay_s)
            await self._flows.wait()
            budget = self._budget
            if budget is not None and budget[0] == direction and carried + len(chunk) > budget[1]:
                writer.write(chunk[: max(0, budget[1] - carried)])
                await writer.drain()
                return
            writer.write(chunk)
            await writer.drain()
            carried += len(chunk)


async def _first_of(pumps: set["asyncio.Task[None]"]) -> None:
    """Wait until one direction has ended, and end the other."""
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a crash does."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
