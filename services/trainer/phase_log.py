"""The phases that a trainer went through lately, as spans of one line: where phases nest, the innermost.

Told of every event of `Phases`, from whichever thread it happens in; asked by the gRPC service.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.trainer.phases import PhaseEvent, Phases

MAX_SPANS = 4096
SHORTEST_S = 0.001
"""A phase that lasted less is left out."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase that has ended, or goes on."""

    number: int
    """1 for the first of the process."""
    name: str
    began_at: float
    """Unix seconds."""
    seconds: float
    is_running: bool = False


class PhaseLog:
    """Listens to the phases, and remembers the last `MAX_SPANS`.

    Args:
        clock: Monotonic seconds, that of the phases.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        phases: Phases,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._phases = phases
        self._clock = clock
        self._offset_s = wall_clock() - clock()
        self._stack: list[str] = []
        self._since = clock()
        self._number = 0
        self._ended: deque[PhaseSpan] = deque(maxlen=MAX_SPANS)
        phases.listen(self._on_event)

    def after(self, number: int) -> Iterator[PhaseSpan]:
        """The spans after the one of this number, oldest first; the one that goes on is the last."""
        ended, stack, since = list(self._ended), tuple(self._stack), self._since
        yield from (span for span in ended if span.number > number)
        name = stack[-1] if stack else self._phases.current.value
        yield PhaseSpan(self._number + 1, name, since + self._offset_s, self._clock() - since, is_running=True)

    def _on_event(self, event: PhaseEvent) -> None:
        if event.kind == "mark":
            return
        name = self._stack[-1] if self._stack else None
        if event.kind == "begin":
            self._stack.append(event.name)
        else:
            self._stack.pop()
        seconds = event.at_s - self._since
        if name is not None and seconds >= SHORTEST_S:
            self._number += 1
            self._ended.append(PhaseSpan(self._number, name, self._since + self._offset_s, seconds))
        self._since = event.at_s
