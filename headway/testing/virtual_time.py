"""An asyncio event loop whose clock jumps: a sleep of an hour takes no time, and every run is the same.

    result = run_virtual(scenario())

While something is ready to run, time stands still. When nothing is, the clock jumps to the next timer. When there is
no timer either, nothing can ever happen again: that is a deadlock, and is raised as one, with the names of the tasks
that wait.

Only for code without threads and sockets: what comes from outside the loop is never waited for.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def _nothing() -> None:
    """No check."""


class Deadlock(RuntimeError):
    """Every task waits for something that cannot happen any more."""


class _JumpingSelector(selectors.BaseSelector):
    """Instead of waiting, moves the loop's clock."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now = 0.0
        self.on_turn: Callable[[], None] = _nothing

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.on_turn()
        if timeout is None:
            raise Deadlock("nothing is ready and no timer runs")
        self.now += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Any:
        return self._inner.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that runs in virtual time; starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def call_every_turn(self, check: Callable[[], None]) -> None:
        """Call `check` after every turn: all callbacks that were ready have run. What it raises ends the run."""
        self._jumping.on_turn = check


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Example:
        >>> run_virtual(asyncio.sleep(3600, "an hour later"))
        'an hour later'

    Raises:
        Deadlock: Everything waits for ever; the message names the tasks.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(loop.create_task(main, name="main"))
    except Deadlock as stuck:
        waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(loop)))
        raise Deadlock(f"at {loop.time():.3f} s {stuck}; waiting: {waiting}") from None
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    loop.call_every_turn(_nothing)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
