"""Run many small asynchronous tasks: started while a budget allows, collected without loss, bounded at every queue.

    submit_task_input --> pending --[capacity > 0]--> input queue --> running --> results of each owner --> wait_results
                        (unbounded)        ^          (bounded)          |           (bounded)                  |
                                           +---- a finished task, --------+           full: the finished task    |
                                                 a new version, resume()              waits, holding its slot <--+

One event loop, nothing polls: every arrow is woken by the one before it. Guarantees:

- every input submitted comes out as exactly one result, or is still pending, running, or waiting to be taken;
- a wait that ends early (time out, cancellation) loses nothing: what had arrived is returned, or put back;
- results go to the owner who submitted, in the order in which they finished, or in the order of submission when asked;
- `pause()` stops new starts; what is running ends and is collected.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from services.rollout_controller.task_runner import AsyncTaskRunner, Job, Make, TimedResult


class WithTaskID(Protocol):
    """An input that names its task."""

    @property
    def task_id(self) -> str: ...


class Budget(Protocol):
    """Decides how many tasks may start: `headway.core.staleness.StalenessManager`, or `Slots`."""

    def get_capacity(self) -> int: ...

    def on_rollout_enqueued(self) -> None: ...

    def on_rollout_submitted(self) -> None: ...

    def on_rollout_accepted(self) -> None: ...

    def on_rollout_rejected(self) -> None: ...


class Slots:
    """A budget of nothing but a number of concurrent tasks: for evaluation, which no staleness bounds."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = self._num_free = num_slots

    def resize(self, num_slots: int) -> None:
        """Have another number of slots from now on; tasks that run stay."""
        self._num_free += num_slots - self._num_slots
        self._num_slots = num_slots

    def get_capacity(self) -> int:
        return self._num_free

    def on_rollout_enqueued(self) -> None:
        """Nothing: only running tasks count."""

    def on_rollout_submitted(self) -> None:
        self._num_free -= 1

    def on_rollout_accepted(self) -> None:
        self._num_free += 1

    def on_rollout_rejected(self) -> None:
        self._num_free += 1


TInput = TypeVar("TInput", bound=WithTaskID)
TResult = TypeVar("TResult")


class BatchTaskDispatcher(Generic[TInput, TResult]):
    """Starts tasks in the order of their submission while the budget allows, and keeps their results until they
    are taken.

    Args:
        max_queue_size: Bound of the input queue, and of the results kept for each owner.
        task_factory: Makes the coroutine function of an input; called when the task is started.
        staleness_manager: The budget.
        is_accepted: Whether a result counts as accepted in the budget; default: it is not None.
    """

    def __init__(
        self,
        max_queue_size: int,
        task_factory: Callable[[TInput], Make[TResult]],
        staleness_manager: Budget,
        is_accepted: Callable[[TResult | None], bool] = lambda result: result is not None,
    ) -> None:
        self.staleness_manager = staleness_manager
        self.runner: AsyncTaskRunner[TResult] = AsyncTaskRunner(max_queue_size, self._on_end, self.wake)
        self._task_factory = task_factory
        self._is_accepted = is_accepted
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[TInput, Hashable, int, float]] = deque()
        self._num_submitted = 0
        self._is_pumping = False
        self._arrived: dict[Hashable, asyncio.Event] = {}
        self._is_paused = False

    # ---- in

    def submit_task_input(self, task_input: TInput, owner: Hashable = None, is_first: bool = False) -> None:
        """Queue a task; never blocks. `is_first` puts it before those that wait."""
        entry = (task_input, owner, self._num_submitted, self._loop.time())
        self._num_submitted += 1
        if is_first:
            self._pending.appendleft(entry)
        else:
            self._pending.append(entry)
        self.staleness_manager.on_rollout_enqueued()
        self.wake()

    def wake(self) -> None:
        """Look at the budget again: capacity may have grown (a new version, a discarded group)."""
        if not self._is_pumping and self._pending:
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def pause(self) -> None:
        """Start nothing from now on; what runs goes on and is collected."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.wake()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_running(self) -> int:
        return self.runner.num_running

    def cancel(self, task_id: str, reason: str) -> bool:
        """Cancel a running task; its result's error is `Withdrawn`. False: it is not running any more."""
        return self.runner.cancel(task_id, reason)

    def _pump(self) -> None:
        """Start pending tasks while the budget and the input queue allow.

        consumes: the oldest pending input     unblocked by: submit_task_input, wake, resume, a task that ended,
        produces: a task in the input queue                  room in the input queue
        """
        self._is_pumping = False
        budget, runner = self.staleness_manager, self.runner
        while self._pending and not self._is_paused and runner.has_room and budget.get_capacity() > 0:
            task_input, owner, order, enqueued_at = self._pending.popleft()
            budget.on_rollout_submitted()
            runner.submit(Job(task_input.task_id, self._task_factory(task_input), owner, order, enqueued_at))

    # ---- out

    async def wait_results(
        self, count: int, timeout: float | None = None, owner: Hashable = None, is_ordered: bool = False
    ) -> list[TimedResult[TResult]]:
        """Take the results of the first `count` tasks of this owner that end.

        Waits until there are so many, but no longer than `timeout` seconds (None: for ever; 0: not at all),
        and returns what has arrived by then, possibly nothing. `is_ordered` sorts them by submission instead
        of by their end.

        waits for: results of this owner     unblocked by: a task that ends
        """
        taken: list[TimedResult[TResult]] = []
        try:
            async with asyncio.timeout(timeout):
                while not self._take(owner, count, taken):
                    await self._arrival(owner)
        except TimeoutError:
            self._take(owner, count, taken)
        except asyncio.CancelledError:
            self.runner.results_of(owner).extendleft(reversed(taken))
            raise
        return sorted(taken, key=lambda result: result.order) if is_ordered else taken

    async def wait_any(self, max_count: int, owner: Hashable = None) -> list[TimedResult[TResult]]:
        """Wait for one result of this owner, and take all that are there, at most `max_count`."""
        taken = await self.wait_results(1, owner=owner)
        self._take(owner, max_count, taken)
        return taken

    def forget(self, owner: Hashable) -> None:
        """An owner is gone: its pending inputs and its results are dropped, its running tasks cancelled."""
        self._pending = deque(entry for entry in self._pending if entry[1] != owner)
        self._arrived.pop(owner, None)
        self.runner.forget(owner)

    async def close(self) -> None:
        """Cancel everything; returns when nothing runs."""
        self._is_paused = True
        await self.runner.close()

    def _take(self, owner: Hashable, count: int, taken: list[TimedResult[TResult]]) -> bool:
        """Move results into `taken`; whether there are `count` now."""
        queue = self.runner.results_of(owner)
        while queue and len(taken) < count:
            taken.append(queue.popleft())
        self.runner.on_taken()
        return len(taken) >= count

    async def _arrival(self, owner: Hashable) -> None:
        event = self._arrived.setdefault(owner, asyncio.Event())
        event.clear()
        await event.wait()

    def _on_end(self, result: TimedResult[TResult], owner: Hashable) -> None:
        if result.error is None and self._is_accepted(result.data):
            self.staleness_manager.on_rollout_accepted()
        else:
            self.staleness_manager.on_rollout_rejected()
        event = self._arrived.get(owner)
        if event is not None:
            event.set()
        self.wake()
