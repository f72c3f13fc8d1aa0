"""Run coroutines as tasks whose results are data: bounded input, bounded results of each owner, cancellation by task.

submit --> input queue --> running --> results of the owner
           (bounded)                   (bounded; full: the finished task waits, holding its slot)
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from headway.errors import Overloaded

TResult = TypeVar("TResult")
Make = Callable[[], Awaitable[TResult | None]]


class Withdrawn(Exception):
    """A task was cancelled by whoever submitted it; the message says why."""


@dataclass(slots=True)
class TimedResult(Generic[TResult]):
    """How a task ended, and when it was where (event loop clock, seconds)."""

    task_id: str
    data: TResult | None
    """What the task returned; None when it raised or was cancelled."""
    error: BaseException | None
    enqueued_at: float
    started_at: float
    finished_at: float
    order: int = 0
    """Place in the order of submission."""


@dataclass(slots=True)
class Job(Generic[TResult]):
    """A task on its way through the runner."""

    task_id: str
    make: Make[TResult]
    owner: Hashable
    order: int
    enqueued_at: float
    has_begun: bool = False
    why_cancelled: str | None = None
    is_finished: bool = False
    """It has ended, and waits for room for its result."""
    is_dropped: bool = False
    """Its owner is gone: the result is for nobody."""
    task: "asyncio.Task[None] | None" = None


class AsyncTaskRunner(Generic[TResult]):
    """Runs coroutines; input and output are bounded, and a full output makes a finished task wait, never fail."""

    def __init__(
        self,
        max_queue_size: int,
        on_end: Callable[[TimedResult[TResult], Hashable], None],
        on_room: Callable[[], None],
    ) -> None:
        self.max_queue_size = max_queue_size
        self._on_end = on_end
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._input: deque[Job[TResult]] = deque()
        self._running: dict[int, Job[TResult]] = {}
        """By their order."""
        self._results: dict[Hashable, deque[TimedResult[TResult]]] = {}
        self._num_blocked = 0
        self._room = asyncio.Event()
        self._is_draining = False
        self._is_closing = False

    @property
    def has_room(self) -> bool:
        return len(self._input) < self.max_queue_size

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, job: "Job[TResult]") -> None:
        """Queue a task; it starts at the loop's next turn.

        Raises:
            Overloaded: The input queue is full.
        """
        if not self.has_room:
            raise Overloaded(f"{self.max_queue_size} tasks are waiting to start")
        self._input.append(job)
        self.drain()

    def drain(self) -> None:
        """Start what is queued, at the loop's next turn."""
        if not self._is_draining and self._input:
            self._is_draining = True
            self._loop.call_soon(self._start_queued)

    def results_of(self, owner: Hashable) -> deque[TimedResult[TResult]]:
        """The results that wait for their owner; who takes from it calls `on_taken`."""
        return self._results.setdefault(owner, deque())

    def on_taken(self) -> None:
        """Results were taken: let finished tasks that wait for room go on."""
        if self._num_blocked:
            self._room.set()

    def forget(self, owner: Hashable) -> None:
        """An owner is gone: its tasks are cancelled, its results dropped."""
        for job in [*self._input, *self._running.values()]:
            if job.owner == owner:
                job.is_dropped = True
                self._cancel(job, "its owner is gone")
        self._results.pop(owner, None)
        self._room.set()

    def cancel(self, task_id: str, reason: str) -> bool:
        """Cancel a task; it ends with a result whose error is `Withdrawn`. False: it is not running any more."""
        jobs = (job for job in self._running.values() if job.task_id == task_id)
        return any(self._cancel(job, reason) for job in jobs)

    @staticmethod
    def _cancel(job: Job[TResult], reason: str) -> bool:
        if job.why_cancelled is not None or job.is_finished or job.task is None:
            return False
        job.why_cancelled = reason
        if job.has_begun:
            job.task.cancel()
        return True

    async def close(self) -> None:
        """Cancel everything and wait until nothing runs; results that were not taken stay."""
        self._is_closing = True
        self._input.clear()
        tasks = [job.task for job in self._running.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()

    def _start_queued(self) -> None:
        self._is_draining = False
        while self._input:
            job = self._input.popleft()
            self._running[job.order] = job
            job.task = self._loop.create_task(self._run(job))
        self._on_room()

    async def _run(self, job: Job[TResult]) -> None:
        """One task, from its start until its result is in its owner's queue.

        waits for: the task itself, then room in the queue (unblocked by: the owner, who takes results)
        """
        job.has_begun = True
        started_at, data = self._loop.time(), None
        error: BaseException | None = None
        try:
            if job.why_cancelled is None and not job.is_dropped:
                data = await job.make()
        except asyncio.CancelledError as cancelled:
            if self._is_closing:
                raise
            error = cancelled
        except Exception as raised:  # noqa: BLE001 - the supervisor of a task: its failure is its result
            error = raised
        job.is_finished = True
        if job.why_cancelled is not None:
            data, error = None, Withdrawn(job.why_cancelled)
        result = TimedResult(job.task_id, data, error, job.enqueued_at, started_at, self._loop.time(), job.order)
        while not job.is_dropped and len(self.results_of(job.owner)) >= self.max_queue_size:
            await self._wait_for_room()
        del self._running[job.order]
        if not job.is_dropped:
            self.results_of(job.owner).append(result)
        self._on_end(result, job.owner)

    async def _wait_for_room(self) -> None:
        self._room.clear()
        self._num_blocked += 1
        try:
            await self._room.wait()
        finally:
            self._num_blocked -= 1
