"""The inside of a worker: read chunks of items, run them one after another, write results.

Runs in a forked child. It is blocking on purpose: nothing else has to happen here, and the service kills what hangs.
A result that the service has not yet seen is at most a millisecond old when the next item starts.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from headway.errors import InvalidInput
from headway.reward.binding import Sample
from headway.reward.evaluate import Evaluator
from headway.reward.outcome import Outcome, ScoreStatus
from headway.v1 import reward_pb2 as pb
from services.reward.wire import CHUNK, ProgressPage, pack_result, unpack_jobs

FLUSH_AFTER_S = 0.001
STATUS_TO_WIRE = {status: pb.ScoreStatus.Value(f"SCORE_STATUS_{status.name}") for status in ScoreStatus}


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told once, by the fork server."""

    constants: Mapping[str, Mapping[str, Any]]
    """Keyword arguments of each function, from the experiment file."""
    memory_limit_bytes: int
    """How much a worker may allocate beyond what it is born with."""


def serve(connection: socket.socket, page: ProgressPage, settings: WorkerSettings) -> None:
    """Run chunks until the service closes the connection or a function has used up the memory."""
    limit_memory(settings.memory_limit_bytes)
    evaluators: dict[str, Evaluator] = {}
    while (header := _receive(connection, CHUNK.size)) is not None:
        length, chunk_id, count = CHUNK.unpack(header)
        body = _receive(connection, length)
        if body is None or not _run_chunk(connection, page, settings, evaluators, chunk_id, count, body):
            return


def _run_chunk(
    connection: socket.socket,
    page: ProgressPage,
    settings: WorkerSettings,
    evaluators: dict[str, Evaluator],
    chunk_id: int,
    count: int,
    body: bytes,
) -> bool:
    """Run one chunk; False: this process is no longer fit to run another."""
    ready = bytearray()
    flushed = time.monotonic()
    for index, (name, item) in enumerate(unpack_jobs(body, count)):
        page.enter(chunk_id, index)
        started = time.monotonic()
        outcome = _run_one(name, item, settings, evaluators)
        now = time.monotonic()
        page.leave()
        ready += pack_result(chunk_id, index, _packed(outcome, now - started))
        is_spent = outcome.status is ScoreStatus.KILLED_MEMORY
        if now - flushed > FLUSH_AFTER_S or is_spent:
            connection.sendall(ready)
            ready.clear()
            flushed = now
        if is_spent:
            return False
    connection.sendall(ready)
    return True


def _run_one(name: str, packed: bytes, settings: WorkerSettings, evaluators: dict[str, Evaluator]) -> Outcome:
    item = pb.ScoreItem.FromString(packed)
    try:
        evaluator = evaluators.get(name)
        if evaluator is None:
            evaluator = evaluators[name] = Evaluator(name, settings.constants.get(name))
        data = orjson.loads(item.data_json) if item.data_json else {}
    except (InvalidInput, orjson.JSONDecodeError) as error:
        return Outcome(ScoreStatus.ERROR, message=str(error))
    sample = Sample(item.completion, item.prompt, data, item.prompt_ids, item.completion_ids)
    return evaluator.run(sample)


def _packed(outcome: Outcome, elapsed_s: float) -> bytes:
    return pb.ScoreResult(
        status=STATUS_TO_WIRE[outcome.status],
        reward=outcome.reward,
        message=outcome.message,
        elapsed_s=elapsed_s,
        parts=outcome.parts,
    ).SerializeToString()


def _receive(connection: socket.socket, length: int) -> bytes | None:
    """Exactly so many bytes; None: the service has closed the connection."""
    parts = bytearray()
    while len(parts) < length:
        data = connection.recv(min(length - len(parts), 1 << 20))
        if not data:
            return None
        parts += data
    return bytes(parts)


def limit_memory(limit_bytes: int) -> None:
    """Let this process allocate `limit_bytes` beyond what it has mapped already; no core files."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + limit_bytes, mapped + limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def become_worker() -> None:
    """Leave what is the fork server's: its signals, its terminal, its session."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    with contextlib.suppress(ValueError, OSError):
        sys.stdout.flush()
    os.close(nothing)
