"""The agent's metrics for Prometheus. Its engine has a door of its own, with the engine's."""

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from headway.runtime.metrics import family, info


class AgentStatus:
    """What the agent says of itself.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._start_s = 0.0
        self._engine = ("", "")
        self.is_registered = False

    def register(self, engine: str, url: str) -> None:
        """The engine may be given requests from now on."""
        self.is_registered, self._engine, self._start_s = True, (engine, url), self._clock() - self._began

    def metrics(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        yield family("headway_inference_registered", self.is_registered)
        yield family("headway_inference_start_seconds", self._start_s or self._clock() - self._began)
        yield info("headway_inference_engine_info", *self._engine)
