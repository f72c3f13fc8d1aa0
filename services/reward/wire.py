"""How the service and its workers talk: frames on a stream socket, and one shared page each.

    to a worker     length u32 | chunk id u32 | count u16 | count x (name length u16 | item length u32 | name | item)
    from a worker   length u32 | chunk id u32 | index u16 | result
    shared page     position i64 (chunk id << 16 | index; -1: in no item) | start of the item f64, monotonic seconds

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
RESULT = struct.Struct("!IIH")
PAGE = struct.Struct("=qd")
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


def pack_result(chunk_id: int, index: int, result: bytes) -> bytes:
    return RESULT.pack(len(result), chunk_id, index) + result


class ResultReader:
    """Cuts a worker's bytes into (chunk id, index, result)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """
        Raises:
            BadFrame: A result is longer than any that a worker writes.
        """
        self._buffer += data
        offset = 0
        while len(self._buffer) - offset >= RESULT.size:
            length, chunk_id, index = RESULT.unpack_from(self._buffer, offset)
            if length > MAX_RESULT_BYTES:
                raise BadFrame(f"a result of {length} bytes")
            end = offset + RESULT.size + length
            if len(self._buffer) < end:
                break
            yield chunk_id, index, bytes(self._buffer[offset + RESULT.size : end])
            offset = end
        del self._buffer[:offset]


class ProgressPage:
    """One page that a worker writes and the service reads: which item runs, and since when."""

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> "tuple[ProgressPage, int]":
        """A new page, and the descriptor that shares it; the caller closes the descriptor."""
        descriptor = os.memfd_create("headway-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        page = cls(descriptor)
        page.leave()
        return page, descriptor

    def enter(self, chunk_id: int, index: int) -> None:
        PAGE.pack_into(self._page, 0, chunk_id << 16 | index, time.monotonic())

    def leave(self) -> None:
        PAGE.pack_into(self._page, 0, NOWHERE, time.monotonic())

    def read(self) -> tuple[int, int, float] | None:
        """Chunk id, index, and the monotonic second at which the item started; None between items."""
        position, started = PAGE.unpack_from(self._page, 0)
        return None if position < 0 else (position >> 16, position & 0xFFFF, started)

    def changed_at(self) -> float:
        """The monotonic second at which an item was last entered or left."""
        return float(PAGE.unpack_from(self._page, 0)[1])

    def close(self) -> None:
        self._page.close()
