"""Every wait has a name that people can see: what is waited for, and since when."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait that has not ended."""

    what: str
    since_s: float
    """How long already, seconds."""


class Waits:
    """The waits of one process, oldest first.

    Example:
        >>> waits = Waits(clock=lambda: 5.0)
        >>> with waits.waiting_for("8 ready groups for step 12"):
        ...     [wait.what for wait in waits.snapshot()]
        ['8 ready groups for step 12']
        >>> waits.snapshot()
        []
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, tuple[str, float]] = {}
        self._next = 0

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Show `what` in the status for as long as the block runs."""
        key, self._next = self._next, self._next + 1
        self._open[key] = (what, self._clock())
        try:
            yield
        finally:
            del self._open[key]

    def snapshot(self) -> list[Wait]:
        now = self._clock()
        return [Wait(what, now - since) for what, since in self._open.values()]
