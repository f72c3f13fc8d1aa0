"""Run items in killable worker processes, so that an item costs itself only.

    submit -> [queues] -> a free worker, a chunk at a time -> results
                               |
          every tick: is the current item past its limit?  the worker is killed, the item answered `timeout`
                      does it burn more CPU than usual, or only wait, while others wait?  the worker steps aside: it
                      goes on beside another one, the rest of its chunk goes back; it goes last when that takes long,
                      or when many do it
          a worker died?  its current item is answered, the rest of its chunk goes back to the queue
                      nobody knows of which item?  each of them is run again, alone: a suspect

Guarantees: every submitted item is answered exactly once, at most a tick after its limit counted from its start; at
most `num_workers` items run beside those put aside; an item's fate never decides another's result.
Proved in tests/robustness/test_reward_attacks.py.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from headway.errors import Overloaded, Unavailable
from headway.v1 import reward_pb2 as pb
from services.reward.crew import Crew, CrewEvents
from services.reward.queues import Job, Queue, Queues
from services.reward.seal import Seal
from services.reward.worker_handle import Answer, WorkerHandle

TICK_S = 0.003
WAITING_AFTER_S = 0.006
CHILDREN_AFTER_S = 0.25
CHILDREN_TIMES_TYPICAL = 5.0
LONG_TIMES_USUAL = 5.0
LONG_S = 0.1
"""CPU seconds that an item has beside the others before it goes last."""
LONG_IN_FLOOD_TIMES_USUAL = 2.0
LONG_IN_FLOOD_S = 0.025
FLOOD_PER_WORKER = 1
"""More items that burn than this are a flood: each goes last sooner, or they would take the CPU from the others."""
YOUNG_ITEMS = 20
YOUNG_CPU_S = 0.02
STALLED_AFTER_S = 30.0
"""A worker that holds items and runs none for so long is broken."""
ASTRAY_AFTER_S = 0.1
"""A worker that is so long in an item that was taken back is ended."""
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
        """What is known of each function: summary, seal, is_async, and its traits."""
        self.layers: list[str] = []
        """Isolation layers in force."""
        self.missing_layers: list[str] = []
        """Isolation layers that are not, each with the reason."""
        events = CrewEvents(self._pump, self._on_results, self._on_death, self._on_all_dead)
        self.crew = Crew(settings.num_workers, settings.for_workers(), events)
        self._queues = Queues({}, settings.num_workers)
        self._suspects: deque[Job] = deque()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._num_unanswered = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        started = await self.crew.start()
        self.functions, self.layers, self.missing_layers = started["ready"], started["layers"], started["missing"]
        queues = {name: Queue(known["typical_s"], known["seal"]) for name, known in self.functions.items()}
        self._queues = Queues(queues, self.settings.num_workers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        unanswered = [*self._queues.drain(), *self._suspects]
        for worker in self.crew.workers:
            unanswered += worker.take_back()
        await self.crew.stop()
        for job in unanswered:
            self._answer(job, pb.SCORE_STATUS_ERROR, "the reward service stopped")

    @property
    def num_queued(self) -> int:
        return self._queues.num_waiting + len(self._suspects)

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
        if jobs:
            self._num_unanswered += len(jobs)
            self._idle.clear()
            self._queues.push(jobs)
            self._pump()

    def abandon(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more: they are dropped from the queue, or ended at the next tick."""
        for job in jobs:
            job.is_abandoned = True
        self._forget(self._queues.remove_abandoned())

    async def drain(self, limit_s: float) -> None:
        """Take no more items, and wait until the ones taken are answered, at most `limit_s`."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    def _pump(self) -> None:
        """Give waiting items to free workers. Suspects go first, and alone."""
        while self.crew.num_busy < self.settings.num_workers:
            if self._suspects and self.crew.num_open:
                break
            function = self._suspects[0].function if self._suspects else self._queues.next_function()
            worker = self.crew.free_worker(self._queues[function].seal) if function is not None else None
            if function is None or worker is None:
                break
            worker.send([self._suspects.popleft()] if self._suspects else self._queues.take(function))
        if self._tick_handle is None and self.crew.num_open:
            self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _on_results(self, worker: WorkerHandle, answered: list[Answer]) -> None:
        is_spent, is_young = False, _is_young(worker)
        for answer in answered:
            if answer.result.status == pb.SCORE_STATUS_KILLED_MEMORY:
                is_spent = answer.job.killed_its_worker = True
            self._queues[answer.job.function].measured(answer.result.elapsed_s, None if is_young else answer.cpu_s)
            self._deliver(answer.job, answer.result, worker.number)
        if is_spent:
            self._end(worker)
        elif worker.is_aside:
            self.crew.take_in(worker)
        if worker.num_open == 0:
            self._pump()

    def _on_death(self, worker: WorkerHandle) -> None:
        """Answer the item that a worker has died of."""
        open_jobs = worker.open_jobs()
        current = worker.current() or ((open_jobs[0], 0.0) if len(open_jobs) == 1 else None)
        if current is not None:
            status, message = cause_of_death(worker.wait_status)
            self._blame(worker, *current, status, message)
        else:
            self._suspects.extend(worker.take_back())
        self._end(worker)
        self._pump()

    def _on_all_dead(self, dead: list[WorkerHandle]) -> None:
        """Answer the suspect that did it again; else, suspect what was running."""
        for worker in dead:
            current = worker.current()
            if current is not None and current[0].is_suspect:
                self._blame(worker, *current, pb.SCORE_STATUS_ERROR, "the function ended the process of all workers")
            elif current is not None:
                worker.take(current[0])
                current[0].is_suspect = True
                self._suspects.append(current[0])
            self._push_back(worker.take_back())

    def _end(self, worker: WorkerHandle) -> None:
        """End a worker; its unanswered items go back to the front of the queue."""
        self._push_back(worker.take_back())
        self.crew.end(worker)

    def _push_back(self, jobs: list[Job]) -> None:
        wanted = [job for job in jobs if not job.is_abandoned]
        self._queues.push_back(wanted)
        self._forget(len(jobs) - len(wanted))

    def _blame(
        self, worker: WorkerHandle, job: Job, elapsed_s: float, status: "pb.ScoreStatus.ValueType", message: str
    ) -> None:
        """Answer an item that has cost its worker."""
        worker.take(job)
        job.killed_its_worker = True
        self._answer(job, status, message, elapsed_s, worker.number)

    def _answer(
        self, job: Job, status: "pb.ScoreStatus.ValueType", message: str, elapsed_s: float = 0.0, worker: int = 0
    ) -> None:
        self._deliver(job, pb.ScoreResult(status=status, message=message, elapsed_s=elapsed_s), worker)

    def _deliver(self, job: Job, result: pb.ScoreResult, worker: int) -> None:
        result.item_id, result.worker = job.item_id, worker
        self._forget(1)
        job.done(job, result)

    def _forget(self, count: int) -> None:
        """So many items are no longer to be answered."""
        self._num_unanswered -= count
        if self._num_unanswered == 0:
            self._idle.set()

    def _tick(self) -> None:
        """Look at what every worker is doing: end what is past its limit or stalled, put aside what is slow."""
        self._tick_handle = None
        for worker in self.crew.workers:
            if worker.num_open == 0:
                continue
            current = worker.current()
            if current is None:
                self._check_stalled(worker)
                continue
            job, elapsed_s = current
            if job.is_abandoned:
                worker.take(job)
                self._forget(1)
                self._end(worker)
            elif elapsed_s > job.limit_s:
                message = f"ran past its limit of {job.limit_s:g} s"
                self._blame(worker, job, elapsed_s, pb.SCORE_STATUS_TIMEOUT, message)
                self._end(worker)
            else:
                self._watch_slow(worker, job, elapsed_s)
        self._pump()

    def _check_stalled(self, worker: WorkerHandle) -> None:
        """End a worker that is not at its items: their turn never came, or something is wrong with one of them."""
        if worker.is_astray() and worker.stalled_s() > ASTRAY_AFTER_S:
            self._end(worker)
        elif worker.stalled_s() > STALLED_AFTER_S:
            self._suspects.extend(worker.take_back())
            self._end(worker)

    def _watch_slow(self, worker: WorkerHandle, job: Job, elapsed_s: float) -> None:
        """Put a worker aside whose item burns more CPU than is usual, or only waits, while others wait for a worker."""
        queue = self._queues[job.function]
        cpu_s = 0.0 if queue.seal == Seal.OPEN else worker.cpu_of_current_s()
        if worker.is_aside:
            if worker.burns and cpu_s > self._long_s(worker, queue):
                worker.go_last()
            return
        others_wait = self._queues.num_waiting > 0 or worker.num_open > 1
        if not others_wait or len(self.crew.aside) >= ASIDE_PER_WORKER * self.settings.num_workers:
            return
        worker.burns = cpu_s > _usual_cpu_s(worker, queue)
        if worker.burns or _only_waits(worker, queue, elapsed_s, cpu_s):
            worker.is_aside = True
            self._push_back(worker.take_back(keep=job))
            self.crew.refill()

    def _long_s(self, worker: WorkerHandle, queue: Queue) -> float:
        """CPU seconds after which an item goes last: a few slow ones may be honest, and share the CPU for a while."""
        usual_s = _usual_cpu_s(worker, queue)
        if sum(other.burns for other in self.crew.aside) > FLOOD_PER_WORKER * self.settings.num_workers:
            return max(LONG_IN_FLOOD_S, LONG_IN_FLOOD_TIMES_USUAL * usual_s)
        return max(LONG_S, LONG_TIMES_USUAL * usual_s)


def _is_young(worker: WorkerHandle) -> bool:
    """Whether it still pays for memory that it shares with the fork server until it writes to it."""
    return worker.num_answered <= YOUNG_ITEMS


def _usual_cpu_s(worker: WorkerHandle, queue: Queue) -> float:
    return queue.usual_cpu_s + (YOUNG_CPU_S if _is_young(worker) else 0.0)


def _only_waits(worker: WorkerHandle, queue: Queue, elapsed_s: float, cpu_s: float) -> bool:
    """Whether an item keeps its worker without computing in it."""
    if queue.seal == Seal.OPEN:  # its children compute
        return elapsed_s > max(CHILDREN_AFTER_S, CHILDREN_TIMES_TYPICAL * queue.typical_s)
    return elapsed_s > max(WAITING_AFTER_S, 2 * cpu_s) and worker.is_sleeping()


def cause_of_death(wait_status: int | None) -> "tuple[pb.ScoreStatus.ValueType, str]":
    """What a worker died of, and the sentence for it."""
    if wait_status is None or not os.WIFSIGNALED(wait_status):
        code = None if wait_status is None else os.waitstatus_to_exitcode(wait_status)
        return pb.SCORE_STATUS_ERROR, f"the function ended its process (exit code {code})"
    number = os.WTERMSIG(wait_status)
    if number == signal.SIGKILL:
        return pb.SCORE_STATUS_KILLED_MEMORY, "the worker got a SIGKILL that was not ours: out of memory"
    return pb.SCORE_STATUS_ERROR, f"the function crashed its process ({signal.Signals(number).name})"
