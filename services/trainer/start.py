"""Where training begins: at the start, or at the newest complete checkpoint, as `recover.mode` says."""

import asyncio
from dataclasses import dataclass

from headway.config import ExperimentConfig
from headway.errors import InvalidInput
from headway.runtime.names import NameClient
from services.trainer.checkpoint import Checkpoint, CheckpointStore


@dataclass(frozen=True)
class Start:
    """Where training begins."""

    checkpoint: Checkpoint | None
    published_step: int
    """Step of the version that an earlier life of the run published; -1: none."""
    is_fresh: bool
    """Nothing of an earlier run of this trial counts."""

    @property
    def last_logged_step(self) -> int:
        """Step of the last statistics that an earlier life of the run has written, and that stay; -1: none."""
        if self.checkpoint is None:
            return -1
        step, unlogged = self.checkpoint.record.version.step, self.checkpoint.record.unlogged
        return step if unlogged is None or step < self.published_step else step - 1


async def find_start(config: ExperimentConfig, checkpoints: CheckpointStore, names: NameClient) -> Start:
    """Where training begins, as `recover.mode` says.

    Raises:
        InvalidInput: Mode `resume`, and there is no complete checkpoint.
    """
    mode = config.recover.mode
    is_wanted = mode in ("auto", "resume") or (mode == "fault" and not checkpoints.is_finished)
    checkpoint = await asyncio.to_thread(checkpoints.newest) if is_wanted else None
    if mode == "resume" and checkpoint is None:
        raise InvalidInput(f"recover.mode is resume, and {checkpoints.root} holds no complete checkpoint")
    await asyncio.to_thread(checkpoints.remove_leftovers)
    if mode != "disabled":
        await asyncio.to_thread(checkpoints.mark_finished, False)
    published = await names.get_version() if is_wanted else None
    is_fresh = checkpoint is None and published is None
    return Start(checkpoint, published.version.step if published else -1, is_fresh)
