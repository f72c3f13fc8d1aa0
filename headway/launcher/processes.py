"""Child processes of the local launcher: started in order, watched together, ended together.

    start -> (line HEADWAY_READY on stdout) -> ready -> ended
                                                 |
                   Ctrl-C, or another child failed: SIGTERM, then SIGKILL to its whole process group

Guarantee: when `processes` is left, no process of it is running, whatever happened; and each child dies with the
launcher, even when that is killed. Output goes to one log file a child; the last lines are kept for the error.
"""

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from headway.errors import HeadwayError, TimedOut
from headway.runtime.service import EXIT_MISTAKE, READY_PREFIX
from headway.runtime.spawn import Spawned, spawn

NUM_LAST_LINES = 15
TERMINATE_GRACE_S = 4.0
KILL_GRACE_S = 2.0
Result = TypeVar("Result")


class ChildFailed(HeadwayError):
    """A child ended that should not have; the message has its name, how it ended, and its last lines."""


@dataclass(frozen=True)
class Command:
    """What to start."""

    name: str
    """For people: "reward/0"."""
    argv: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the launcher's own."""
    is_foundation: bool = False
    """Others need it to end cleanly: it is stopped after them."""
    may_end: bool = False
    """Ending by itself with exit code 0 is no failure."""
    retries: int = 0
    """How often it is started again after a failure."""


class Child:
    """A process and its output; the process may be another one after a failure."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.ports: dict[str, int] = {}
        self.is_ready = asyncio.Event()
        self.has_ended = asyncio.Event()
        """Set when it has ended for good: it is not started again."""
        self.num_retries_left = command.retries
        self._process: Spawned | None = None
        self._transport: asyncio.ReadTransport | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, for the first time or again.

        Raises:
            FileNotFoundError: There is no such program.
        """
        self.close()
        read_end, write_end = os.pipe()
        try:
            self._process = spawn(self.command.argv, self.command.environment, write_end, signal.SIGTERM)
        except FileNotFoundError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        reader, self._transport = await _reader_of(read_end)
        self._pump = asyncio.create_task(self._copy_output(reader), name=f"output of {self.command.name}")

    def close(self) -> None:
        """Stop to read the output."""
        if self._transport is not None:
            self._transport.close()

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        return self._started.returncode

    @property
    def _started(self) -> Spawned:
        if self._process is None:
            raise RuntimeError(f"{self.command.name} was not started")
        return self._process

    async def exited(self) -> int:
        """Wait until the present process has exited and its output is read; its exit code."""
        code = await self._started.wait()
        if self._pump is not None:
            await asyncio.wait({self._pump}, timeout=KILL_GRACE_S)
        return code

    async def ready(self, timeout_s: float) -> None:
        """Wait for the line that says so.

        Raises:
            TimedOut: It did not come in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.is_ready.wait()
        except TimeoutError as error:
            raise TimedOut(f"{self.command.name} was not ready within {timeout_s:.0f} s; {self._tail()}") from error

    def failure(self) -> ChildFailed:
        """The error that says how the process ended."""
        code = self.returncode or 0
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return ChildFailed(f"{self.command.name} ended ({how}); {self._tail()}")

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        self._started.signal(number)

    def _tail(self) -> str:
        lines = "\n".join(f"    {line}" for line in self.last_lines)
        return f"log {self.log}, last lines:\n{lines}" if lines else f"log {self.log} is empty"

    async def _copy_output(self, reader: asyncio.StreamReader) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            async for raw in reader:
                self._on_line(raw.decode(errors="replace").rstrip("\n"), file)

    def _on_line(self, line: str, file: IO[str]) -> None:
        print(line, file=file, flush=True)
        if line.startswith(READY_PREFIX):
            self.ports = json.loads(line.removeprefix(READY_PREFIX))["ports"]
            self.is_ready.set()
        else:
            self.last_lines.append(line)


class Processes:
    """The children of one launch."""

    def __init__(self, log_folder: Path, on_retry: Callable[[ChildFailed], None]) -> None:
        self._log_folder = log_folder
        self._on_retry = on_retry
        self.children: list[Child] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watches: set[asyncio.Task[None]] = set()

    async def start(self, command: Command) -> Child:
        """Start a process in a group of its own, and watch it.

        Raises:
            HeadwayError: The program is not there.
        """
        child = Child(command, self._log_folder / f"{command.name.replace('/', '-')}.log")
        try:
            await child.start()
        except FileNotFoundError as error:
            raise HeadwayError(f"cannot start {command.name}: no program {command.argv[0]!r}") from error
        self.children.append(child)
        watch = asyncio.create_task(self._watch(child), name=f"watch {command.name}")
        self._watches.add(watch)
        return child

    async def guarded(self, work: Awaitable[Result]) -> Result:
        """The result of `work`, unless a child fails first.

        Raises:
            ChildFailed: A child ended that should not have.
        """
        working = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {working, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await working
        finally:
            working.cancel()
            await asyncio.wait({working})

    async def stop(self) -> None:
        """End all children: politely, those that others stand on last; then by force."""
        for watch in self._watches:
            watch.cancel()
        for is_foundation, grace_s in ((False, TERMINATE_GRACE_S), (True, KILL_GRACE_S)):
            alive = [c for c in self.children if c.returncode is None and c.command.is_foundation is is_foundation]
            for child in alive:
                child.signal(signal.SIGTERM)
            await _wait_for(alive, grace_s)
        for child in self.children:
            child.signal(signal.SIGKILL)  # the group: whatever a child has left behind
        await _wait_for(self.children, KILL_GRACE_S)
        for child in self.children:
            child.close()

    async def _watch(self, child: Child) -> None:
        """Start a failed child again while it has retries left; a mistake would only be made again."""
        while (code := await child.exited()) not in (0, EXIT_MISTAKE) and child.num_retries_left:
            child.num_retries_left -= 1
            self._on_retry(child.failure())
            child.signal(signal.SIGKILL)  # what it has left behind
            await child.start()
        child.has_ended.set()
        if (code != 0 or not child.command.may_end) and not self._failed.done():
            self._failed.set_exception(child.failure())


async def _reader_of(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20, loop=loop)
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe)
    return reader, transport


async def _wait_for(children: Sequence[Child], timeout_s: float) -> None:
    waits = [asyncio.ensure_future(child.exited()) for child in children]
    if waits:
        await asyncio.wait(waits, timeout=timeout_s)
    for wait in waits:
        wait.cancel()


@asynccontextmanager
async def processes(
    log_folder: Path, on_retry: Callable[[ChildFailed], None] = lambda failure: None
) -> AsyncIterator[Processes]:
    """The children of one launch, logging to a folder that is there; all are gone when the block is left.

    Args:
        log_folder: One log file a child.
        on_retry: Told of each failure after which the child is started again.
    """
    running = Processes(log_folder, on_retry)
    try:
        yield running
    finally:
        await asyncio.shield(running.stop())
