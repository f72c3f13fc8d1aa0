"""How many gRPC calls this process has answered, with which status, and how long they took."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.errors import HeadwayError


class Calls:
    """Counts by method and status.

    Args:
        clock: Monotonic seconds.

    Example:
        >>> now = iter([0.0, 2.5])
        >>> calls = Calls(clock=lambda: next(now))
        >>> with calls.counted("/headway.v1.Reward/Score"):
        ...     pass
        >>> dict(calls.num), dict(calls.seconds)
        ({('/headway.v1.Reward/Score', 'OK'): 1}, {'/headway.v1.Reward/Score': 2.5})
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """Count the call that the block answers."""
        began, code = self._clock(), "OK"
        try:
            yield
        except BaseException as error:  # counted by its code, and raised again
            code = code_of(error)
            raise
        finally:
            self.num[method, code] += 1
            self.seconds[method] += self._clock() - began


def code_of(error: BaseException) -> str:
    """The status as which an error travels."""
    if isinstance(error, HeadwayError):
        return error.grpc_code
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


CALLS = Calls()
"""Of this process."""
