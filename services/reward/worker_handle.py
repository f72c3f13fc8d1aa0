"""The service's side of one worker: its connection, its progress page, and the items it holds."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from google.protobuf.message import DecodeError

from headway.v1 import reward_pb2 as pb
from services.reward.queues import Job
from services.reward.wire import BadFrame, Chunk, ProgressPage, ResultReader, pack_chunk


@dataclass(frozen=True, slots=True)
class Answer:
    """An item with its result."""

    job: Job
    result: pb.ScoreResult
    cpu_s: float


class WorkerHandle(asyncio.Protocol):
    """One worker process.

    Callbacks: `on_results(worker, answers)`; `on_lost(worker)` when its connection ends without having been asked to.
    """

    def __init__(
        self,
        number: int,
        on_results: Callable[["WorkerHandle", list["Answer"]], None],
        on_lost: Callable[["WorkerHandle"], None],
    ) -> None:
        self.number = number
        self.pid = 0
        self.seal = ""
        """What it has settled for; empty: it has not run anything yet."""
        self.burns = False
        """Its item was put aside because it computes, and not because it waits."""
        self.is_last = False
        """It runs when nothing else does, for good."""
        self.is_aside = False
        """Runs one slow item, while another worker has taken its place."""
        self.wait_status: int | None = None
        self.is_closed = False
        self.is_disconnected = False
        self._on_results, self._on_lost = on_results, on_lost
        self._page, self._page_descriptor = ProgressPage.create()
        self._reader = ResultReader()
        self._transport: asyncio.Transport | None = None
        self._chunk: list[Job | None] = []
        self._chunk_id = 0
        self._num_open = 0
        self.num_answered = 0
        self._sent_at = 0.0

    async def open(self) -> tuple[int, int]:
        """Connect this side; returns the descriptors for the worker, which the caller closes."""
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        return theirs.detach(), self._page_descriptor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answered = []
        try:
            for result in self._reader.feed(data):
                job = self._answered(result.chunk_id, result.index)
                if job is not None:
                    answered.append(Answer(job, pb.ScoreResult.FromString(result.packed), result.cpu_s))
        except (BadFrame, DecodeError):
            self._abort()
        self.num_answered += len(answered)
        if answered:
            self._on_results(self, answered)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_disconnected = True
        if not self.is_closed:
            self._on_lost(self)

    def _answered(self, chunk_id: int, index: int) -> Job | None:
        if chunk_id != self._chunk_id or index >= len(self._chunk):
            return None
        job, self._chunk[index] = self._chunk[index], None
        self._num_open -= job is not None
        return job

    @property
    def is_free(self) -> bool:
        return self._num_open == 0 and self.pid > 0 and not (self.is_closed or self.is_disconnected or self.is_aside)

    @property
    def num_open(self) -> int:
        """Items sent and not answered."""
        return self._num_open

    def send(self, jobs: list[Job]) -> None:
        self._chunk_id = (self._chunk_id + 1) & 0xFFFFFFFF
        self._chunk = list(jobs)
        self._num_open = len(jobs)
        self._sent_at = time.monotonic()
        chunk = Chunk(self._chunk_id, [(job.function, job.packed) for job in jobs])
        assert self._transport is not None, "only a forked worker is free, and it is connected"
        self._transport.write(pack_chunk(chunk))

    def stalled_s(self) -> float:
        """How long it has not been at any of its items, seconds: in none, or still in one that was taken back."""
        return time.monotonic() - (self._sent_at if self._page.read() else max(self._sent_at, self._page.changed_at()))

    def is_astray(self) -> bool:
        """Whether it is in an item that was taken back: it had begun it just then."""
        return self._page.read() is not None and self.current() is None

    def current(self) -> tuple[Job, float] | None:
        """The item that runs now, and for how long, seconds; None: it is between items."""
        progress = self._page.read()
        if progress is None or progress.chunk_id != self._chunk_id or progress.index >= len(self._chunk):
            return None
        job = self._chunk[progress.index]
        return None if job is None else (job, time.monotonic() - progress.started)

    def cpu_of_current_s(self) -> float:
        """CPU seconds that the current item has used."""
        progress = self._page.read()
        with suppress(OSError):
            used_s = time.clock_gettime((~self.pid << 3) | 2)  # the process's CPU clock: clock_getcpuclockid(3)
            return used_s - progress.cpu_before_s if progress is not None else 0.0
        return 0.0

    def is_sleeping(self) -> bool:
        """Whether it waits for something that is no CPU."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        except (OSError, IndexError):
            return False

    def take(self, job: Job) -> None:
        """Consider this item answered, where it is one of this worker's."""
        if job in self._chunk:
            self._chunk[self._chunk.index(job)] = None
            self._num_open -= 1

    def open_jobs(self) -> list[Job]:
        """The unanswered items."""
        return [job for job in self._chunk if job is not None]

    def take_back(self, keep: Job | None = None) -> list[Job]:
        """The unanswered items, without `keep`; results for them are ignored from now on."""
        open_jobs = [job for job in self.open_jobs() if job is not keep]
        self._chunk = [job if job is keep else None for job in self._chunk]
        self._num_open = int(keep is not None)
        if open_jobs and not self.is_closed:
            self._page.ask_to_leave(self._chunk_id)
        return open_jobs

    def go_last(self) -> None:
        """Let every other worker, and whoever else computes here, go first. Cannot be taken back without privileges."""
        if not self.is_last:
            self.is_last = True
            with suppress(OSError):
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    def close(self) -> None:
        """Forget the worker; killing it is the fork server's."""
        self._abort()
        if not self.is_closed:
            self.is_closed = True
            self._page.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
