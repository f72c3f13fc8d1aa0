"""Lines of dumps: numbers of a sample first, its per-token arrays last, so that a list needs only heads of lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

FIRST_ARRAY = (b',"token_ids":[', b',"loss_mask":[')
"""Where the arrays begin. Within a JSON string every quote stands behind a backslash: neither can occur in a text."""
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Head:
    """What a line says before its arrays."""

    values: dict[str, Any]
    offset: int
    """Of the line in its file, bytes."""
    size: int


def heads(path: Path, start: int) -> Iterator[Head]:
    """The heads of all whole lines from byte `start` on, which is the beginning of one."""
    with path.open("rb") as file:
        file.seek(start)
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield Head(head_of(line), start, len(line) + 1)
                start += len(line) + 1


def head_of(line: bytes) -> dict[str, Any]:
    """The values of a line that come before its arrays.

    Example:
        >>> head_of(b'{"task_id":"0/1","prompt":"2+2=","token_ids":[5,6]}')
        {'task_id': '0/1', 'prompt': '2+2='}
    """
    for mark in FIRST_ARRAY:
        if (end := line.find(mark)) >= 0:
            line = line[:end] + b"}"
            break
    found: dict[str, Any] = orjson.loads(line)
    return found


def line_at(path: Path, offset: int, size: int) -> dict[str, Any]:
    """The whole line at a place that `heads` gave."""
    with path.open("rb") as file:
        file.seek(offset)
        found: dict[str, Any] = orjson.loads(file.read(size))
    return found
