"""Run items in killable worker processes, so that an item costs itself only.

    submit -> [queues] -> a free worker, a chunk at a time -> results
                               |
                 tick: is the current item past its limit?  kill the worker, answer `timeout`
                       is it much slower than usual, and do others wait?  put the worker aside: it goes on at low
                       priority, a fresh one takes its place, the rest of its chunk goes back to the queue
                 the worker died?  its current item is answered; the rest of its chunk goes back to the queue

Guarantees: every submitted job is answered exactly once, at most a tick after its limit counted from its start; at most
`num_workers` items run at full priority; an item's fate never decides another's result.
Proved in tests/robustness/test_reward_attacks.py.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from headway.errors import Overloaded, Unavailable
from headway.v1 import reward_pb2 as pb
from services.reward.fork_client import ForkClient, close_all
from services.reward.queues import Job, Queue, Queues
from services.reward.worker_handle import WorkerHandle

log = logging.getLogger(__name__)

TICK_S = 0.004
SLOW_TIMES_TYPICAL = 5.0
SLOW_AT_LEAST_S = 0.004
WAITING_AFTER_S = 0.05
STARTING_LIMIT_S = 60.0
ASIDE_PER_WORKER = 32


@dataclass(frozen=True)
class PoolSettings:
    """How the pool is built."""

    functions: Sequence[str]
    """Every function that may be asked for."""
    warm: Sequence[str] = ()
    """Those whose imports are loaded before workers are forked."""
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keyword arguments of each function."""
    num_workers: int = 2
    memory_limit_mb: int = 2048
    max_queued: int = 4096

    def for_workers(self) -> dict[str, Any]:
        return {
            "functions": list(self.functions),
            "warm": list(self.warm),
            "constants": self.constants,
            "memory_limit_bytes": self.memory_limit_mb * 2**20,
        }


class Pool:
    """The workers and what waits for them. One event loop calls in; nothing here blocks."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.functions: dict[str, dict[str, Any]] = {}
        """What is known of each function: summary, is_async, and its traits."""
        self.layers: list[str] = []
        """Isolation layers in force."""
        self.missing_layers: list[str] = []
        """Isolation layers that are not, each with the reason."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises when the pool cannot go on."""
        self.num_replaced = 0
        self._server = ForkClient(self._on_forked, self._on_ended, self._on_server_gone)
        self._workers: dict[int, WorkerHandle] = {}
        self._by_pid: dict[int, WorkerHandle] = {}
        self._queues = Queues({}, settings.num_workers)
        self._suspects: deque[Job] = deque()
        """Items of which one ended a worker or the fork server, nobody knows which: each is run again, alone."""
        self._num_made = 0
        self._tick_handle: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._num_unanswered = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        started = await self._server.start(self.settings.for_workers())
        self.functions, self.layers, self.missing_layers = started["ready"], started["layers"], started["missing"]
        queues = {name: Queue(known["typical_s"], known["seal"]) for name, known in self.functions.items()}
        self._queues = Queues(queues, self.settings.num_workers)
        self._refill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        unanswered = [*self._queues.drain(), *self._suspects]
        for worker in list(self._workers.values()):
            unanswered += worker.take_back()
            worker.close()
        await self._server.stop()
        for job in unanswered:
            self._answer(job, pb.SCORE_STATUS_ERROR, "the reward service stopped")
        self.failed.cancel()

    @property
    def num_queued(self) -> int:
        return self._queues.num_waiting + len(self._suspects)

    @property
    def num_running(self) -> int:
        return sum(worker.num_open for worker in self._workers.values())

    @property
    def num_aside(self) -> int:
        return sum(worker.is_aside for worker in self._workers.values())

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue items; each is answered through its `done`.

        Raises:
            Overloaded: They do not all fit in the queue; none was taken.
            Unavailable: The pool is closing.
        """
        if self._is_closing:
            raise Unavailable("the reward service is stopping")
        if self._queues.num_waiting + len(jobs) > self.settings.max_queued:
            raise Overloaded(f"{self._queues.num_waiting} items wait already; {len(jobs)} more exceed max_queued")
        self._num_unanswered += len(jobs)
        if jobs:
            self._idle.clear()
        self._queues.push(jobs)
        self._pump()

    async def drain(self, limit_s: float) -> None:
        """Take no more items, and wait until the ones taken are answered, at most `limit_s`."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)

    # Giving out work

    def _pump(self) -> None:
        """Give waiting items to free workers. Suspects go first, and alone."""
        for worker in [worker for worker in self._workers.values() if worker.is_free and worker.pid]:
            if self._suspects and self.num_running:
                break
            function = self._suspects[0].function if self._suspects else self._queues.next_function()
            if function is None:
                break
            seal = self._queues[function].seal
            if worker.seal not in ("", seal):
                self._remove(worker)
                continue
            worker.seal = seal
            worker.send([self._suspects.popleft()] if self._suspects else self._queues.take(function))
        self._refill()
        self._schedule_tick()

    def _refill(self) -> None:
        """Keep `num_workers` workers beside those that are put aside."""
        if not self._server.is_running:
            return
        missing = self.settings.num_workers - (len(self._workers) - self.num_aside)
        for _ in range(missing):
            self._num_made += 1
            worker = WorkerHandle(self._num_made, self._on_results, self._on_lost)
            self._workers[worker.number] = worker
            task = asyncio.get_running_loop().create_task(self._start(worker), name=f"start worker {worker.number}")
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, worker: WorkerHandle) -> None:
        descriptors = await worker.open()
        if worker.is_closed:
            worker.close()
            close_all(descriptors)
        else:
            self._server.fork(worker.number, descriptors)

    def _on_forked(self, number: int, pid: int) -> None:
        worker = self._workers.get(number)
        if worker is None:
            self._server.kill(pid)
            return
        worker.pid = pid
        self._by_pid[pid] = worker
        self._pump()

    # Results and ends

    def _on_results(self, worker: WorkerHandle, answered: list[tuple[Job, pb.ScoreResult]]) -> None:
        is_spent = worker.is_aside
        for job, result in answered:
            if result.status == pb.SCORE_STATUS_KILLED_MEMORY:
                is_spent = job.killed_its_worker = True
            self._queues[job.function].measured(result.elapsed_s)
            self._deliver(job, result, worker.number)
        if is_spent:
            self._replace(worker)
        if worker.num_open == 0 or is_spent:
            self._pump()

    def _on_lost(self, worker: WorkerHandle) -> None:
        """The connection ended: the wait status decides, when it is there."""
        if worker.wait_status is not None or not worker.pid:
            self._bury(worker)

    def _on_ended(self, pid: int, status: int) -> None:
        worker = self._by_pid.pop(pid, None)
        if worker is None or worker.is_closed:
            return
        worker.wait_status = status
        if worker.is_disconnected:
            self._bury(worker)

    def _bury(self, worker: WorkerHandle) -> None:
        """A worker has died by itself: answer the item that it died of."""
        current = worker.current()
        open_jobs = worker.open_jobs()
        if current is None and len(open_jobs) == 1:
            current = (open_jobs[0], 0.0)
        if current is not None:
            job, elapsed_s = current
            worker.take(job)
            job.killed_its_worker = True
            status, message = _cause_of_death(worker.wait_status)
            self._answer(job, status, message, elapsed_s, worker.number)
        else:
            self._suspects.extend(worker.take_back())
        self._replace(worker)
        self._pump()

    def _replace(self, worker: WorkerHandle) -> None:
        """End a worker; its unanswered items go back to the front of the queue."""
        self.num_replaced += 1
        self._queues.push_back(worker.take_back())
        self._remove(worker)

    def _remove(self, worker: WorkerHandle) -> None:
        self._workers.pop(worker.number, None)
        worker.close()
        if worker.pid and worker.wait_status is None:
            self._server.kill(worker.pid)
        self._refill()

    def _on_server_gone(self) -> None:
        """The fork server died, and every worker with it. What ran then is run again, alone, to see what does it."""
        if self._is_closing:
            return
        log.error("the fork server died; starting another one")
        running = [current[0] for worker in self._workers.values() if (current := worker.current()) is not None]
        for worker in list(self._workers.values()):
            for job in running:
                worker.take(job)
            self._queues.push_back(worker.take_back())
            self._workers.pop(worker.number)
            worker.close()
            self.num_replaced += 1
        self._by_pid.clear()
        if len(running) == 1:
            running[0].killed_its_worker = True
            self._answer(running[0], pb.SCORE_STATUS_ERROR, "the function ended the process that starts workers")
        else:
            self._suspects.extend(running)
        task = asyncio.get_running_loop().create_task(self._restart_server(), name="restart the fork server")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _restart_server(self) -> None:
        try:
            await self._server.stop()
            await self._server.start(self.settings.for_workers())
        except Exception as error:  # noqa: BLE001 - the supervisor of the fork server: the service ends with the reason
            if not self.failed.done():
                self.failed.set_exception(error)
            return
        self._refill()

    def _deliver(self, job: Job, result: pb.ScoreResult, worker: int) -> None:
        result.item_id, result.worker = job.item_id, worker
        self._num_unanswered -= 1
        if self._num_unanswered == 0:
            self._idle.set()
        job.done(job, result)

    def _answer(
        self, job: Job, status: "pb.ScoreStatus.ValueType", message: str, elapsed_s: float = 0.0, worker: int = 0
    ) -> None:
        self._deliver(job, pb.ScoreResult(status=status, message=message, elapsed_s=elapsed_s), worker)

    # Time

    def _schedule_tick(self) -> None:
        if self._tick_handle is None and any(worker.num_open for worker in self._workers.values()):
            self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Look at what every worker is doing: kill what is past its limit, put aside what is slow."""
        self._tick_handle = None
        for worker in [worker for worker in self._workers.values() if worker.num_open]:
            current = worker.current()
            if current is None:
                continue
            job, elapsed_s = current
            if elapsed_s > job.limit_s:
                self._expire(worker, job, elapsed_s)
            elif not worker.is_aside and self._is_slow(worker, job, elapsed_s):
                self._put_aside(worker, job)
        self._pump()

    def _expire(self, worker: WorkerHandle, job: Job, elapsed_s: float) -> None:
        worker.take(job)
        job.killed_its_worker = True
        self._answer(job, pb.SCORE_STATUS_TIMEOUT, f"ran past its limit of {job.limit_s:g} s", elapsed_s, worker.number)
        self._replace(worker)

    def _is_slow(self, worker: WorkerHandle, job: Job, elapsed_s: float) -> bool:
        """Whether others wait for an item that burns more time than usual, or that only waits itself."""
        if not (self._queues.num_waiting or worker.num_open > 1):
            return False
        if self.num_aside >= ASIDE_PER_WORKER * self.settings.num_workers:
            return False
        usual_s = max(SLOW_AT_LEAST_S, SLOW_TIMES_TYPICAL * self._queues[job.function].typical_s)
        if self.functions[job.function]["is_async"]:
            usual_s = SLOW_AT_LEAST_S
        if elapsed_s < usual_s:
            return False
        return worker.cpu_of_current_s() > usual_s / 2 or elapsed_s > max(WAITING_AFTER_S, 2 * usual_s)

    def _put_aside(self, worker: WorkerHandle, job: Job) -> None:
        """Let a worker go on with its slow item beside a fresh one; the slower of many slow ones go last."""
        worker.is_aside = True
        self._queues.push_back(worker.take_back(keep=job))
        worker.lower_priority(is_last=False)
        aside = [other for other in self._workers.values() if other.is_aside]
        if len(aside) > self.settings.num_workers:
            aside[-1 - self.settings.num_workers].lower_priority(is_last=True)
        self._refill()


def _cause_of_death(wait_status: int | None) -> "tuple[pb.ScoreStatus.ValueType, str]":
    """What a worker died of, and the sentence for it."""
    if wait_status is None or not os.WIFSIGNALED(wait_status):
        code = None if wait_status is None else os.waitstatus_to_exitcode(wait_status)
        return pb.SCORE_STATUS_ERROR, f"the function ended its process (exit code {code})"
    number = os.WTERMSIG(wait_status)
    if number == signal.SIGKILL:
        return pb.SCORE_STATUS_KILLED_MEMORY, "the worker got a SIGKILL that was not ours: out of memory"
    return pb.SCORE_STATUS_ERROR, f"the function crashed its process ({signal.Signals(number).name})"
