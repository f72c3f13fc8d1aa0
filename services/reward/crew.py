"""The worker processes: born of the fork server, counted, ended, and born again.

Decides nothing about items. It tells its owner what happens, and keeps enough workers beside those put aside.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import Unavailable
from services.reward.fork_client import ForkClient, close_all
from services.reward.worker_handle import Answer, WorkerHandle

log = logging.getLogger(__name__)

FORK_AGAIN_S = 0.5
SPARE_TIMES = 3
"""Workers may be so many times `num_workers`: some are free after they were aside, some have another seal."""
MAX_RESTARTS = 10
RESTARTS_WITHIN_S = 60.0


@dataclass(frozen=True)
class CrewEvents:
    """What the owner wants to hear."""

    on_ready: Callable[[], None]
    """A worker is free."""
    on_results: Callable[[WorkerHandle, list[Answer]], None]
    on_death: Callable[[WorkerHandle], None]
    """A worker has died by itself; it still holds its items."""
    on_all_dead: Callable[[list[WorkerHandle]], None]
    """The fork server died, and every worker with it; they still hold their items."""


class Crew:
    """The workers of one service."""

    def __init__(self, num_workers: int, settings: Mapping[str, Any], events: CrewEvents) -> None:
        self.num_replaced = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises when there can be no workers any more."""
        self._num_workers = num_workers
        self._settings = settings
        self._events = events
        self._server = ForkClient(self._on_forked, self._on_not_forked, self._on_ended, self._on_server_gone)
        self._workers: dict[int, WorkerHandle] = {}
        self._by_pid: dict[int, WorkerHandle] = {}
        self._num_made = 0
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    async def start(self) -> dict[str, Any]:
        """Start the fork server, then workers; returns what the fork server says of itself."""
        described = await self._server.start(self._settings)
        self.refill()
        return described

    async def stop(self) -> None:
        """End every process; returns when they are gone."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        await self._server.stop()
        self.failed.cancel()

    @property
    def workers(self) -> Iterable[WorkerHandle]:
        """Those that live, oldest first; a copy."""
        return list(self._workers.values())

    @property
    def num_open(self) -> int:
        """Items that workers hold."""
        return sum(worker.num_open for worker in self._workers.values())

    @property
    def num_busy(self) -> int:
        """Workers that hold items, without those that are aside."""
        return sum(worker.num_open > 0 and not worker.is_aside for worker in self._workers.values())

    @property
    def aside(self) -> list[WorkerHandle]:
        """Workers that go on with one slow item, oldest first."""
        return [worker for worker in self._workers.values() if worker.is_aside]

    def free_worker(self, seal: str) -> WorkerHandle | None:
        """A worker that may run functions of this seal; None: one is being made."""
        free = [worker for worker in self._workers.values() if worker.is_free]
        for wanted in (seal, ""):
            for worker in free:
                if worker.seal == wanted:
                    worker.seal = seal
                    return worker
        if not any(worker.pid == 0 for worker in self._workers.values()):
            if free and len(self._workers) - len(self.aside) >= SPARE_TIMES * self._num_workers:
                self.dismiss(free[0])
            else:
                self._make()
        return None

    def take_in(self, worker: WorkerHandle) -> None:
        """A worker that was aside has finished: it stays, unless it goes last for ever, or there are enough."""
        if worker.is_last or len(self._workers) - len(self.aside) >= SPARE_TIMES * self._num_workers:
            self.end(worker)
        else:
            worker.is_aside = worker.burns = False

    def refill(self) -> None:
        """Make the workers that are missing: one more than work at a time, so that nothing waits for a fork."""
        for _ in range(self._num_workers + 1 - len(self._workers) + len(self.aside)):
            self._make()

    def _make(self) -> None:
        if not self._server.is_running or self._is_stopped:
            return
        self._num_made += 1
        worker = WorkerHandle(self._num_made, self._events.on_results, self._on_disconnected)
        self._workers[worker.number] = worker
        self._run(self._start(worker), f"start worker {worker.number}")

    def end(self, worker: WorkerHandle) -> None:
        """End a worker, and make another one."""
        self.num_replaced += 1
        self.dismiss(worker)

    def dismiss(self, worker: WorkerHandle) -> None:
        """End a worker that has done nothing wrong."""
        self._workers.pop(worker.number, None)
        worker.close()
        if worker.pid and worker.wait_status is None:
            self._server.kill(worker.pid)
        self.refill()

    def _run(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        self._events.on_ready()

    def _on_not_forked(self, number: int, reason: str) -> None:
        log.warning("a worker could not be started: %s", reason)
        worker = self._workers.pop(number, None)
        if worker is not None:
            worker.close()
        asyncio.get_running_loop().call_later(FORK_AGAIN_S, self.refill)

    def _on_disconnected(self, worker: WorkerHandle) -> None:
        """Its connection ended. When it is dead, its wait status comes too, sooner or later."""
        if worker.wait_status is not None:
            self._events.on_death(worker)

    def _on_ended(self, pid: int, status: int) -> None:
        worker = self._by_pid.pop(pid, None)
        if worker is None or worker.is_closed:
            return
        worker.wait_status = status
        if worker.is_disconnected:
            self._events.on_death(worker)

    def _on_server_gone(self) -> None:
        if self._is_stopped:
            return
        log.error("the fork server died; starting another one")
        dead = list(self._workers.values())
        self._workers.clear()
        self._by_pid.clear()
        self.num_replaced += len(dead)
        self._events.on_all_dead(dead)
        for worker in dead:
            worker.close()
        self._run(self._restart(), "restart the fork server")

    async def _restart(self) -> None:
        now = asyncio.get_running_loop().time()
        self._restarts.append(now)
        try:
            if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTARTS_WITHIN_S:
                raise Unavailable(f"the fork server died {MAX_RESTARTS} times within {RESTARTS_WITHIN_S:.0f} s")
            await self._server.stop()
            await self._server.start(self._settings)
        except Exception as error:  # noqa: BLE001 - the supervisor of the fork server: the service ends with the reason
            if not self.failed.done():
                self.failed.set_exception(error)
            return
        self.refill()
