"""The inside of a worker: read chunks of items, run them one after another, write results.

Runs in a forked child. It is blocking on purpose: nothing else has to happen here, and the service kills what hangs.
A result that the service has not yet seen is at most FLUSH_AFTER_S old when the next item starts.
"""

import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from headway.errors import InvalidInput
from headway.reward.binding import Sample
from headway.reward.evaluate import Evaluator
from headway.reward.outcome import Outcome, ScoreStatus
from headway.v1 import reward_pb2 as pb
from services.reward.seal import close, seal_of
from services.reward.wire import CHUNK, STATUS_TO_WIRE, ProgressPage, Result, pack_result, unpack_jobs

FLUSH_AFTER_S = 0.004
SELDOM = (20_000, 50, 100)
"""Thresholds of the garbage collector: sympy makes much that is gone at once, and little that hangs together."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told once, by the fork server."""

    constants: Mapping[str, Mapping[str, Any]]
    """Keyword arguments of each function, from the experiment file."""
    memory_limit_bytes: int
    """How much a worker may allocate beyond what it is born with."""
    protected: tuple[int, ...] = ()
    """Processes that functions must not end."""


def serve(connection: socket.socket, page: ProgressPage, settings: WorkerSettings) -> None:
    """Run chunks until the service closes the connection or a function has used up the memory."""
    limit_memory(settings.memory_limit_bytes)
    evaluators = Evaluators(settings)
    while (header := _receive(connection, CHUNK.size)) is not None:
        length, chunk_id, count = CHUNK.unpack(header)
        body = _receive(connection, length)
        if body is None or not _run_chunk(connection, page, evaluators, chunk_id, unpack_jobs(body, count)):
            return


class Evaluators:
    """The functions that this worker has run. The first one decides what the worker may do from then on."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._loaded: dict[str, Evaluator] = {}

    def __getitem__(self, name: str) -> Evaluator:
        """
        Raises:
            InvalidInput: There is no such function.
        """
        loaded = self._loaded.get(name)
        if loaded is None:
            loaded = Evaluator(name, self._settings.constants.get(name))
            if not self._loaded:
                close(seal_of(loaded.function), self._settings.protected)
            self._loaded[name] = loaded
        return loaded


def _run_chunk(
    connection: socket.socket,
    page: ProgressPage,
    evaluators: Evaluators,
    chunk_id: int,
    jobs: Iterable[tuple[str, bytes]],
) -> bool:
    """Run one chunk; False: this process is no longer fit to run another."""
    ready = bytearray()
    flushed = time.monotonic()
    for index, (name, item) in enumerate(jobs):
        if page.should_leave(chunk_id):
            break
        started, cpu_before_s = time.monotonic(), time.process_time()
        page.enter(chunk_id, index, started, cpu_before_s)
        outcome = _run_one(name, item, evaluators)
        now, cpu_s = time.monotonic(), time.process_time() - cpu_before_s
        page.leave()
        ready += pack_result(Result(chunk_id, index, cpu_s, _packed(outcome, now - started)))
        if outcome.status is ScoreStatus.KILLED_MEMORY:
            connection.sendall(ready)
            return False
        if now - flushed > FLUSH_AFTER_S:
            connection.sendall(ready)
            ready.clear()
            flushed = now
    connection.sendall(ready)
    return True


def _run_one(name: str, packed: bytes, evaluators: Evaluators) -> Outcome:
    item = pb.ScoreItem.FromString(packed)
    try:
        evaluator = evaluators[name]
        data = orjson.loads(item.data_json) if item.data_json else {}
    except (InvalidInput, orjson.JSONDecodeError) as error:
        return Outcome(ScoreStatus.ERROR, message=str(error))
    return evaluator.run(Sample(item.completion, item.prompt, data, item.prompt_ids, item.completion_ids))


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
    """Leave what is the fork server's: its signals, its output, its process group; and collect garbage seldom.

    The session stays the fork server's, which has no terminal: where Linux shares the CPU out among sessions first
    (autogroup), priorities count only within one.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    gc.set_threshold(*SELDOM)
