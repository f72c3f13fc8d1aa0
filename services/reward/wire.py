"""How the service and its workers talk: frames on a stream socket, and one shared page each.

    to a worker     length u32 | chunk id u32 | count u16 | count x (name length u16 | item length u32 | name | item)
    from a worker   length u32 | chunk id u32 | index u16 | CPU seconds of the item f32 | result
    shared page     position i64 (chunk id << 16 | index; -1: in no item) | start of the item f64, monotonic seconds |
                    CPU seconds of the process at the start f64; and from the service: chunk to be left after the
                    current item i64

Items and results are the protobuf messages of the public interface. A result is read by the service, so it is never
pickled: a worker that runs hostile code can lie about its own items, and no more.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.reward.outcome import ScoreStatus
from headway.v1 import reward_pb2 as pb

STATUS_TO_WIRE = {status: pb.ScoreStatus.Value(f"SCORE_STATUS_{status.name}") for status in ScoreStatus}
CHUNK = struct.Struct("!IIH")
JOB = struct.Struct("!HI")
RESULT = struct.Struct("!IIHf")
PAGE = struct.Struct("=qdd")
LEAVE = struct.Struct("=q")
LEAVE_AT = 64
MAX_RESULT_BYTES = 16 * 1024
NOWHERE = -1


class BadFrame(Exception):
    """The peer wrote something that is no frame."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items for one worker, run in order: (function, ScoreItem bytes) each."""

    chunk_id: int
    jobs: Sequence[tuple[str, bytes]]


def pack_chunk(chunk: Chunk) -> bytes:
    parts = [b""]
    for name, item in chunk.jobs:
        encoded = name.encode()
        parts += (JOB.pack(len(encoded), len(item)), encoded, item)
    length = sum(map(len, parts))
    parts[0] = CHUNK.pack(length, chunk.chunk_id, len(chunk.jobs))
    return b"".join(parts)


def unpack_jobs(body: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    offset = 0
    for _ in range(count):
        name_length, item_length = JOB.unpack_from(body, offset)
        start = offset + JOB.size
        offset = start + name_length + item_length
        yield body[start : start + name_length].decode(), body[start + name_length : offset]


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker says of one item."""

    chunk_id: int
    index: int
    cpu_s: float
    packed: bytes
    """The ScoreResult, serialised."""


def pack_result(result: Result) -> bytes:
    return RESULT.pack(len(result.packed), result.chunk_id, result.index, result.cpu_s) + result.packed


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker is at."""

    chunk_id: int
    index: int
    started: float
    """Monotonic second."""
    cpu_before_s: float
    """CPU seconds that the process had used before."""


class ResultReader:
    """Cuts a worker's bytes into results."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Result]:
        """
        Raises:
            BadFrame: A result is longer than any that a worker writes.
        """
        self._buffer += data
        offset = 0
        while len(self._buffer) - offset >= RESULT.size:
            length, chunk_id, index, cpu_s = RESULT.unpack_from(self._buffer, offset)
            if length > MAX_RESULT_BYTES:
                raise BadFrame(f"a result of {length} bytes")
            end = offset + RESULT.size + length
            if len(self._buffer) < end:
                break
            yield Result(chunk_id, index, cpu_s, bytes(self._buffer[offset + RESULT.size : end]))
            offset = end
        del self._buffer[:offset]


class ProgressPage:
    """One page that a worker writes and the service reads: which item runs, and since when. And one word back."""

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> "tuple[ProgressPage, int]":
        """A new page, and the descriptor that shares it; the caller closes the descriptor."""
        descriptor = os.memfd_create("headway-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        page = cls(descriptor)
        page.leave()
        page.ask_to_leave(NOWHERE)
        return page, descriptor

    def enter(self, chunk_id: int, index: int, now: float, cpu_s: float) -> None:
        PAGE.pack_into(self._page, 0, chunk_id << 16 | index, now, cpu_s)

    def leave(self) -> None:
        PAGE.pack_into(self._page, 0, NOWHERE, time.monotonic(), 0.0)

    def ask_to_leave(self, chunk_id: int) -> None:
        """The service wants the rest of this chunk back."""
        LEAVE.pack_into(self._page, LEAVE_AT, chunk_id)

    def should_leave(self, chunk_id: int) -> bool:
        return bool(LEAVE.unpack_from(self._page, LEAVE_AT)[0] == chunk_id)

    def read(self) -> Progress | None:
        """The item that the worker is in; None: between items."""
        position, started, cpu_s = PAGE.unpack_from(self._page, 0)
        return None if position < 0 else Progress(position >> 16, position & 0xFFFF, started, cpu_s)

    def changed_at(self) -> float:
        """The monotonic second at which an item was last entered or left."""
        return float(PAGE.unpack_from(self._page, 0)[1])

    def close(self) -> None:
        self._page.close()
