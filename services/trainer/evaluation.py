"""Held-out evaluations beside training, each of one version.

    begin --> waits while a version is being published --> the published version on the held-out tasks --> statistics
                                                                  |
    publishing waits until none runs  <---------------------------+

Training goes on meanwhile: the next step consumes its batch, and only what it made is published later.
Guarantee: while an evaluation runs, its version stays the newest, so that every token can be made by it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput, Unavailable
from services.trainer.actions import Parts
from services.trainer.phases import Phase
from services.trainer.statistics import Stats, evaluation_stats

log = logging.getLogger(__name__)


class Evaluation:
    """One evaluation at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._is_newest = asyncio.Lock()
        """Held while an evaluation runs, and while a version is published."""
        self._published: PolicyVersion | None = None
        self._task: asyncio.Task[Stats] | None = None
        self._begun: asyncio.Future[PolicyVersion] | None = None
        self.running: PolicyVersion | None = None

    @asynccontextmanager
    async def publishing(self, version: PolicyVersion) -> AsyncIterator[None]:
        """The block publishes a version; it begins when no evaluation runs, and none begins before it ends."""
        if self._is_newest.locked():
            with self._parts.phases(Phase.EVALUATE):
                await self._is_newest.acquire()
        else:
            await self._is_newest.acquire()
        try:
            yield
            self._published = version
        finally:
            self._is_newest.release()

    def begin(self) -> "asyncio.Task[Stats]":
        """Evaluate the published version. One that runs, or is about to begin, is the answer."""
        if self._task is None or self._task.done():
            self._begun = asyncio.get_running_loop().create_future()
            self._task = self._parts.start_task("evaluation", self._run(self._begun))
        return self._task

    async def request(self) -> PolicyVersion:
        """Begin one because people ask for it; returns its version when it has begun.

        Raises:
            InvalidInput: There are no held-out tasks.
            Unavailable: Nothing is published yet.
        """
        if not self._parts.evaluation_tasks:
            raise InvalidInput("there are no held-out tasks: the experiment has no valid_dataset")
        if self._published is None:
            raise Unavailable("no version is published yet")
        self.begin()
        assert self._begun is not None
        return await asyncio.shield(self._begun)

    async def ended(self) -> None:
        """Wait until none runs."""
        if self._task is not None and not self._task.done():
            with self._parts.phases(Phase.EVALUATE):
                await asyncio.wait({self._task})

    async def close(self) -> None:
        """End it as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, begun: "asyncio.Future[PolicyVersion]") -> Stats:
        async with self._is_newest:
            assert self._published is not None, "an evaluation begins after the first publication"
            version = self.running = self._published
            begun.set_result(version)
            parts = self._parts
            try:
                results = await parts.controller.evaluate(
                    version, parts.config.evaluation_gconfig.n_samples, parts.evaluation_tasks
                )
            finally:
                self.running = None
        stats = evaluation_stats(results)
        log.info("evaluation of %s: %s", version.label, {name: round(value, 4) for name, value in stats.items()})
        return stats
