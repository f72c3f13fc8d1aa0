"""Files that last: written, fsynced, and hashed meanwhile."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 8 * 1024**2
"""How much is handed to the disk, and to the hash, at a time."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    name: str
    bytes: int
    sha256: str


def write_file(path: Path, buffers: Iterable[memoryview]) -> WrittenFile:
    """Write buffers one after the other, fsynced; hashes them meanwhile in a second thread."""
    digest = hashlib.sha256()
    size = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing:
            pending = []
            for chunk in _chunks(buffers):
                pending.append(hashing.submit(_hash_all, digest, chunk))
                size += _write_all(handle, chunk)
            os.fsync(handle)
            for done in pending:
                done.result()
    finally:
        os.close(handle)
    return WrittenFile(path.name, size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the folder's entries last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A second name for the file; where the file system has none, a copy on disk."""
    try:
        os.link(source, target)
    except OSError:
        write_file(Path(target), [memoryview(Path(source).read_bytes())])


def _chunks(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Small buffers gathered, large ones cut: about CHUNK_BYTES at a time."""
    chunk: list[memoryview] = []
    size = 0
    for buffer in buffers:
        for start in range(0, len(buffer), CHUNK_BYTES):
            chunk.append(buffer[start : start + CHUNK_BYTES])
            size += len(chunk[-1])
            if size >= CHUNK_BYTES or len(chunk) >= 512:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _write_all(handle: int, chunk: Sequence[memoryview]) -> int:
    total = sum(len(buffer) for buffer in chunk)
    written = os.writev(handle, chunk)
    if written < total:  # interrupted by a signal, or the disk is nearly full: the plain way says which
        rest = memoryview(b"".join(chunk))[written:]
        while rest:
            rest = rest[os.write(handle, rest) :]
    return total


def _hash_all(digest: "hashlib._Hash", chunk: Sequence[memoryview]) -> None:
    for buffer in chunk:
        digest.update(buffer)
