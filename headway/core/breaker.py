"""Decide when a server that failed is tried again.

    closed --TRIP_AFTER failures in a row--> open --after a pause, doubling up to a limit--> half-open
       ^                                       ^                                                |
       +---------------- success --------------+------------- failure, one trial at a time -----+

Pure: time is an argument, seconds on any clock that does not go back.
"""

from dataclasses import dataclass

TRIP_AFTER = 3
"""Failures in a row that open a breaker."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0


@dataclass(slots=True)
class Breaker:
    """Keeps requests from a server that fails.

    Example:
        >>> breaker = Breaker()
        >>> breaker.trip(now=0.0)
        >>> breaker.allows(now=0.4), breaker.allows(now=0.6)
        (False, True)
    """

    failures: int = 0
    """In a row."""
    opened_until: float | None = None
    """None: closed."""
    pause_s: float = FIRST_PAUSE_S
    is_on_trial: bool = False
    """Half-open, with its one trial request under way."""

    def allows(self, now: float) -> bool:
        return self.opened_until is None or (now >= self.opened_until and not self.is_on_trial)

    def begin(self) -> None:
        """A request was given to the server."""
        self.is_on_trial = self.opened_until is not None

    def succeed(self) -> None:
        self.failures, self.opened_until, self.pause_s, self.is_on_trial = 0, None, FIRST_PAUSE_S, False

    def fail(self, now: float) -> None:
        self.failures += 1
        if self.failures >= TRIP_AFTER or self.opened_until is not None:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open at once: the server is known to be down."""
        if self.opened_until is not None and now < self.opened_until and not self.is_on_trial:
            return  # one outage, reported by several requests
        self.opened_until, self.is_on_trial = now + self.pause_s, False
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def give_up_trial(self) -> None:
        """The trial request ended without saying anything about the server."""
        self.is_on_trial = False
