"""What a train step leaves behind: a published version, a commit, an evaluation, a checkpoint, an export.

Each is one call of the loop, in the order that the loop decides; each is safe to be cut off anywhere.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.config import ExperimentConfig
from headway.core.version import PolicyVersion
from headway.data import Dataset, Task
from headway.errors import StaleVersion, TimedOut, Unavailable
from services.trainer.checkpoint import CheckpointStore, TrainerRecord
from services.trainer.controller_client import ControllerClient
from services.trainer.phases import Phase, Phases
from services.trainer.ranks import Ranks
from services.trainer.schedule import RunLength
from services.trainer.statistics import Stats, StatsLogger
from services.trainer.tracing import PhaseTrace
from services.trainer.warm_start import WarmStartPlan
from services.trainer.weights import WrittenVersion

KEEP_NEWEST = 4
"""Versions that stay on disk though no server is known to need them."""
PUBLISH_PATIENCE_S = 600.0
PUBLISH_RETRY_S = 0.5
log = logging.getLogger(__name__)


class Publisher(Protocol):
    """The part of name-resolve that knows versions; `NameClient` in production."""

    async def publish_version(self, version: PolicyVersion, manifest_sha256: str, fencing_token: int) -> None:
        """Make a version the published one.

        Raises:
            StaleVersion: A newer version, or a later leader, exists.
        """


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    config: ExperimentConfig
    length: RunLength
    term: int
    fencing_token: int
    ranks: Ranks
    controller: ControllerClient
    publisher: Publisher
    checkpoints: CheckpointStore
    statistics: StatsLogger
    phases: Phases
    dataset: Dataset
    start_task: "Callable[[str, Coroutine[Any, Any, Any]], asyncio.Task[Any]]"
    """Runs something beside the loop; its failure ends the process."""
    evaluation_tasks: Sequence[Task]
    warm_start: WarmStartPlan | None
    trace: PhaseTrace | None = None


@dataclass
class Progress:
    """What the loop counts."""

    version: PolicyVersion
    published_step: int
    """Nothing is published before this step is reached."""
    parent: PolicyVersion | None = None
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    num_samples: int = 0
    trained_s: float = 0.0
    is_consuming: bool = False
    """The batch of the step in hand is booked as consumed."""
    checkpointed: PolicyVersion | None = None
    """The version of the last checkpoint."""
    unlogged: Stats | None = None
    """Statistics of the last step, which wait for the evaluation of its version; None: they are written."""
    stop_reason: str | None = None
    saves: "list[asyncio.Future[Path]]" = field(default_factory=list)


class Actions:
    """Acts on the weights in hand.

    Args:
        progress: Shared with the loop, which moves it.
        publishing: Entered to make a version the published one.
    """

    def __init__(
        self,
        parts: Parts,
        progress: Progress,
        publishing: Callable[[PolicyVersion], AbstractAsyncContextManager[None]],
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._publishing = publishing
        self._config = parts.config
        self._phases = parts.phases
        self._writing: asyncio.Task[Path] | None = None
        """The last checkpoint's writing."""

    async def publish(self, version: PolicyVersion) -> None:
        """Write the weights, and make them the published version, once no evaluation needs the one before."""
        with self._phases(Phase.WRITE):
            written: WrittenVersion = await self._parts.ranks.call("write", version, self._progress.parent)
        async with self._publishing(version):
            await self._publish(version, written)
        self._progress.parent = version

    async def _publish(self, version: PolicyVersion, written: WrittenVersion) -> None:
        with self._phases(Phase.PUBLISH):
            token = self._parts.fencing_token
            await _patiently(
                f"publish {version.label}",
                lambda: self._parts.publisher.publish_version(version, written.manifest_sha256, token),
            )

    async def commit(self, step: int, stats: Stats) -> None:
        """Say that `step` has consumed its batch, and remove the versions that no server needs any more."""
        with self._phases(Phase.COMMIT):
            finite = {name: value for name, value in stats.items() if math.isfinite(value)}
            needed = await self._parts.controller.commit(step, self._progress.version, finite)
            await self._parts.ranks.call_here("remove_weights", needed, KEEP_NEWEST)

    async def checkpoint(self, tasks: Mapping[str, Any]) -> "asyncio.Task[Path]":
        """Take a checkpoint of the state between two steps; one that is still being written is waited for first.

        Args:
            tasks: The feeder's state.

        Returns:
            Writes the checkpoint, beside training, and ends when it is complete.
        """
        progress = self._progress
        record = TrainerRecord(
            progress.version, tasks, progress.num_skipped, progress.num_samples, progress.trained_s, progress.unlogged
        )
        with self._phases(Phase.CHECKPOINT):
            await self.checkpoint_written()
            aside = await asyncio.to_thread(self._parts.checkpoints.begin, progress.version)
            saving = await self._parts.ranks.call("save", aside)
        progress.checkpointed = progress.version
        writing = self._write_checkpoint(aside, saving, record)
        self._writing = self._parts.start_task(f"write checkpoint {record.version.label}", writing)
        return self._writing

    async def checkpoint_written(self) -> None:
        """Return when no checkpoint is being written."""
        if self._writing is not None:
            await self._writing

    async def _write_checkpoint(self, aside: Path, saving: "Future[None]", record: TrainerRecord) -> Path:
        """Complete it once all ranks have written; only then may the controller forget what lies before it.

        Raises:
            StaleVersion: A later leader has removed what was written.
        """
        checkpoints = self._parts.checkpoints
        try:
            await asyncio.wrap_future(saving)
            path = await asyncio.to_thread(checkpoints.complete, aside, record)
        except Exception as error:  # whichever write found its folder gone; it is raised again
            if checkpoints.is_gone(aside, record.version):
                raise StaleVersion(f"checkpoint {record.version.label} was removed by a later leader") from error
            raise
        await self._parts.controller.forget_before(record.version.step)
        return path

    async def export(self) -> None:
        """Keep the published weights as a folder that `from_pretrained` loads."""
        saver = self._config.saver
        with self._phases(Phase.SAVE):
            path = await self._parts.ranks.call(
                "export", self._progress.version, self._config.paths.checkpoints, saver.keep_last
            )
        log.info("the model is saved at %s", path)


async def _patiently(what: str, action: "Callable[[], Awaitable[Any]]") -> Any:
    """Repeat an idempotent action while name-resolve is away."""
    deadline = time.monotonic() + PUBLISH_PATIENCE_S
    while True:
        try:
            return await action()
        except (Unavailable, TimedOut) as error:
            if time.monotonic() > deadline:
                raise
            log.warning("%s: %s; trying again", what, error)
        await asyncio.sleep(PUBLISH_RETRY_S)
