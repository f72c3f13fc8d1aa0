"""Where requests wait for a server: the router, with time and waiting added.

    acquire --router says yes--> a server     waits for: a server that may take the request
                                              unblocked by: `notify` (a server opens, a breaker closes), time

All waiting requests show as one named wait.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from headway.core.routing import Router, RoutingPolicy, Wanted
from headway.runtime.waits import Waits


class Gate:
    """Gives requests to servers, by key."""

    def __init__(self, policy: RoutingPolicy, waits: Waits, clock: Callable[[], float]) -> None:
        self.router = Router(policy)
        self.num_waiting = 0
        self._waits = waits
        self._clock = clock
        self._changed = asyncio.Event()
        self._shown = ExitStack()

    def notify(self) -> None:
        """Something has changed: let everyone who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def acquire(self, wanted: Wanted, check: Callable[[], None]) -> str:
        """Wait for a server that may take the request; `release` must follow. `check` raises when none ever will."""
        chosen = self.router.choose(wanted, self._clock())
        if chosen is not None:
            return chosen
        with self._waiting():
            while chosen is None:
                check()
                await self._change()
                chosen = self.router.choose(wanted, self._clock())
        return chosen

    def release(self, server: str, wanted: Wanted, is_success: bool | None) -> None:
        """A request has left its server; None says nothing about the server."""
        self.router.release(server, wanted.tokens, self._clock(), is_success)
        if self.num_waiting:
            self.notify()

    def trip(self, server: str) -> None:
        """The server is known to be down."""
        self.router.trip(server, self._clock())

    async def until(self, what: str, is_true: Callable[[], bool]) -> None:
        """Wait until something holds; looked at after each `notify`."""
        if is_true():
            return
        with self._waits.waiting_for(what):
            while not is_true():
                await self._changed.wait()

    async def _change(self) -> None:
        now = self._clock()
        trial = self.router.next_trial(now)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if trial is None else max(0.0, trial - now)):
                await self._changed.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.num_waiting += 1
        if self.num_waiting == 1:
            self._shown.enter_context(self._waits.waiting_for("an inference server that may take requests"))
        try:
            yield
        finally:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self._shown.close()
