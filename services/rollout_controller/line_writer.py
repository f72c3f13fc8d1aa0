"""Write lines of JSON to files from beside the event loop: none is lost, none is torn, and nothing piles up.

    add(item) --> backlog --[flush_at]--> a thread: encode, append        room() waits while the backlog is full
                                                                          unblocked by: the thread takes it

Guarantees: what was added before the block is left is in the files then. A file ends in a whole line at any time but
within a write; what a killed process left of a line is cut off before the next one is appended.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from headway.errors import Unavailable
from headway.runtime.supervisor import Supervisor

T = TypeVar("T")
Contra = TypeVar("Contra", contravariant=True)
MAX_BACKLOG = 64
"""Items that may wait while one write is under way."""


class Sink(Protocol[Contra]):
    """Where finished things go."""

    def add(self, item: Contra) -> None:
        """Take it; never waits."""
        ...

    async def room(self) -> None:
        """Wait until there is room for more."""
        ...


class LineWriter(Generic[T]):
    """Appends lines to files; an async context manager.

    Args:
        what: Names the task in the supervisor.
        encode: Gives the bytes to append to each file, whole lines; runs in the thread.
        supervisor: Ends the process when a write fails.
        flush_at: Items that are kept before they are written.
        written: Hears of files that have grown, in the thread.
    """

    def __init__(
        self,
        what: str,
        encode: Callable[[Sequence[T]], Mapping[Path, bytes]],
        supervisor: Supervisor,
        flush_at: int = 1,
        written: Callable[[Iterable[Path]], None] | None = None,
    ) -> None:
        self._encode = encode
        self._flush_at = flush_at
        self._written = written
        self._backlog: list[T] = []
        self._is_due = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._max_backlog = flush_at + MAX_BACKLOG
        self._thread = ThreadPoolExecutor(1, what)
        self._known: set[Path] = set()
        """Files whose end is known to be whole."""
        self._writing = supervisor.start(what, self._write_when_due())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the rest.

        Raises:
            Unavailable: It cannot be written.
        """
        self._writing.cancel()
        try:
            await self._flush()
        finally:
            self._thread.shutdown()

    def add(self, item: T) -> None:
        """Take an item; it is written soon, or with the next `flush_at`."""
        self._backlog.append(item)
        if len(self._backlog) >= self._flush_at:
            self._is_due.set()
        if len(self._backlog) >= self._max_backlog:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait until there is room for more: whoever produces lines faster than the disk takes them is slowed down."""
        await self._has_room.wait()

    async def _write_when_due(self) -> None:
        """waits for: `flush_at` items     unblocked by: `add`     produces: lines, and room for more"""
        while True:
            await self._is_due.wait()
            await self._flush()

    async def _flush(self) -> None:
        items, self._backlog = self._backlog, []
        self._is_due.clear()
        self._has_room.set()
        if items:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._write, items))

    def _write(self, items: Sequence[T]) -> None:
        encoded = self._encode(items)
        for path, lines in encoded.items():
            try:
                self._append(path, lines)
            except OSError as error:
                raise Unavailable(f"cannot write {path}: {error.strerror}") from error
        if self._written is not None:
            self._written(encoded)

    def _append(self, path: Path, lines: bytes) -> None:
        if path not in self._known:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if path not in self._known:
                cut_torn_line(descriptor)
                self._known.add(path)
            append_whole(descriptor, lines)
        finally:
            os.close(descriptor)


def append_whole(descriptor: int, lines: bytes) -> None:
    """Append all of it, or nothing.

    Raises:
        OSError: The disk is full, or broken.
    """
    size, rest = os.fstat(descriptor).st_size, memoryview(lines)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def cut_torn_line(descriptor: int) -> None:
    """Cut off what follows the last newline."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
    os.ftruncate(descriptor, end)
