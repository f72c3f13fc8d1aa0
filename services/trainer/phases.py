"""What the trainer does now, since when, and where the time of each step went.

One timeline: phases follow each other and may nest; the seconds of a phase are those in which it was the innermost.
Used from the event loop and from the torch thread, never by both at once.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phases; the value is the name in `timing/...`."""

    STARTING = "starting"
    STANDBY = "standby"
    WARM_START = "warm_start"
    WAIT_FOR_BATCH = "wait_for_batch"
    LOGPROB = "logprob"
    REF_LOGPROB = "ref_logprob"
    ADVANTAGES = "advantages"
    UPDATE = "update"
    WRITE = "write"
    PUBLISH = "publish"
    COMMIT = "commit"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    LOG = "log"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """A phase began or ended, or a point within it was reached."""

    kind: str
    """`begin`, `end` or `mark`."""
    name: str
    at_s: float
    """Monotonic time."""


class Phases:
    """The timeline.

    Args:
        clock: Monotonic seconds.

    Example:
        >>> now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
        >>> phases = Phases(clock=lambda: next(now))
        >>> with phases(Phase.UPDATE):
        ...     with phases(Phase.LOGPROB):
        ...         pass
        >>> phases.take_seconds()
        {'update': 6.0, 'logprob': 3.0}
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack: list[Phase] = []
        self._since = clock()
        self._seconds: dict[str, float] = {}
        self._totals = dict.fromkeys(map(str, Phase), 0.0)
        self._shown = dict(self._totals)
        self._listeners: list[Callable[[PhaseEvent], None]] = []
        self.current = Phase.STARTING
        self.current_since = self._since
        self.progress = 0.0
        """Part of the current phase that is done, 0 to 1; 0 where it is not known."""

    def listen(self, listener: Callable[[PhaseEvent], None]) -> None:
        """Tell `listener` of every event, in order, in the thread where it happens."""
        self._listeners.append(listener)

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` for as long as the block runs."""
        self._switch("begin", phase)
        self._stack.append(phase)
        self._enter(phase)
        try:
            yield
        finally:
            self._stack.pop()
            self._switch("end", phase, ended=phase)
            if self._stack:
                self._enter(self._stack[-1])

    def stay_in(self, phase: Phase) -> None:
        """Be in `phase` from now on, outside any block."""
        self._since = self._book(self._clock())
        self._enter(phase)

    def mark(self, name: str) -> None:
        """Say that a point within a phase is reached."""
        self._tell(PhaseEvent("mark", name, self._clock()))

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def total_seconds(self) -> dict[str, float]:
        """Seconds by phase since the start, up to now. Never less than before, though another thread may switch."""
        now = self._totals | {self.current.value: self._totals[self.current.value] + self._clock() - self._since}
        self._shown = {phase: max(now[phase], shown) for phase, shown in self._shown.items()}
        return self._shown

    def seconds_in_phase(self) -> float:
        return self._clock() - self.current_since

    def _enter(self, phase: Phase) -> None:
        self.current, self.current_since, self.progress = phase, self._since, 0.0

    def _switch(self, kind: str, phase: Phase, ended: Phase | None = None) -> None:
        """Book the time since the last switch on the phase that was the innermost."""
        now = self._clock()
        innermost = ended or (self._stack[-1] if self._stack else None)
        if innermost is not None:
            self._seconds[innermost.value] = self._seconds.get(innermost.value, 0.0) + now - self._since
        self._since = self._book(now)
        self._tell(PhaseEvent(kind, phase.value, now))

    def _book(self, now: float) -> float:
        """Add the time since the last switch to the total of the phase that was current; returns `now`."""
        self._totals[self.current.value] += now - self._since
        return now

    def _tell(self, event: PhaseEvent) -> None:
        for listener in self._listeners:
            listener(event)
