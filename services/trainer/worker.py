"""The torch work of one rank. The loop asks for it by name; every rank does the same, in the same order.

Nothing here knows of gRPC, versions' order or staleness: arrays and folders come in, numbers and folders go out.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from headway.algorithm.batch import SampleBatch
from headway.config import ExperimentConfig
from headway.core.version import PolicyVersion
from services.trainer.background import in_background
from services.trainer.broadcast import WeightSender
from services.trainer.checkpoint import copy_tensors, load_tensors, save_tensors
from services.trainer.distributed import group_of_all_ranks
from services.trainer.engine import TrainEngine
from services.trainer.model_files import static_files
from services.trainer.phases import Phase, Phases
from services.trainer.token_dump import TokenDump
from services.trainer.warm_start import WarmStartPlan
from services.trainer.weights import WeightStore, WrittenVersion

SAVE_TIMEOUT = timedelta(hours=1)
"""How long ranks wait for each other while they write a checkpoint."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one batch."""

    is_applied: bool
    """False: loss or gradient was not finite, and nothing was changed."""
    stats: dict[str, float]


class TorchWorker:
    """One rank's engine, and what the loop wants of it.

    Args:
        phases: Timeline of this rank.
    """

    def __init__(self, config: ExperimentConfig, phases: Phases) -> None:
        self._config = config
        self._phases = phases
        self._engine: TrainEngine | None = None
        self._store: WeightStore | None = None
        self._token_dump: TokenDump | None = None
        """Of rank 0, where the file asks for dumps."""
        self._saving: Future[None] | None = None
        """The last checkpoint's writing."""
        self._save_group: torch.distributed.ProcessGroup | None = None
        """In which the ranks agree about a checkpoint while they train in others."""
        self.sender: WeightSender | None = None
        """Sends what was written straight to the engines; None: they read it from disk."""
        self.is_stopping = threading.Event()
        """Set: long work ends at its next pause."""

    @property
    def engine(self) -> TrainEngine:
        if self._engine is None:
            raise RuntimeError("the model is not loaded yet")
        return self._engine

    def load(self, total_steps: int) -> None:
        """Build the model, the optimizer and the reference."""
        self._engine = TrainEngine(self._config, total_train_steps=total_steps)
        self._save_group = group_of_all_ranks(SAVE_TIMEOUT)
        if self._config.rollout.dump_to_file and self._engine.rank == 0:
            self._token_dump = TokenDump(self._config.paths.rollouts)

    def warm_start(self, plan: WarmStartPlan) -> dict[str, float]:
        """Train supervised, step by step; returns the last step's statistics."""
        stats: dict[str, float] = {}
        with _threads_of_warm_start(), self.engine.supervised(lr=plan.lr, num_steps=len(plan.steps)):
            for number, rows in enumerate(plan.steps):
                if self.is_stopping.is_set():
                    break
                sequences = [plan.sequences[row] for row in rows]
                stats = self.engine.sft_step(sequences, label_smoothing=plan.label_smoothing).stats
                self._phases.progress = (number + 1) / len(plan.steps)
        return stats

    def train(self, batch: SampleBatch, step: int) -> StepResult:
        """One train step: proximal and reference log-probs, advantages, update, learning rate."""
        engine = self.engine
        engine.version = step
        if engine.needs_prox_logp:
            with self._phases(Phase.LOGPROB):
                batch = batch.with_(prox_logp=engine.compute_prox_logp(batch))
        if engine.has_ref:
            with self._phases(Phase.REF_LOGPROB):
                batch = batch.with_(ref_logp=engine.compute_ref_logp(batch))
        with self._phases(Phase.ADVANTAGES):
            batch = engine.compute_advantages(batch)
        with self._phases(Phase.UPDATE):
            result = engine.ppo_update(batch, keeps_logp=self._config.rollout.dump_to_file)
            if result.applied:
                engine.step_lr_scheduler()
                engine.version = step + 1
        if self._token_dump is not None and result.applied and result.logp is not None:
            self._token_dump.add(step, batch.with_(prox_logp=result.prox_logp), result.logp)
        return StepResult(result.applied, dict(result.stats))

    def write(self, version: PolicyVersion, parent: PolicyVersion | None) -> WrittenVersion | None:
        """Write the weights, or the adapter alone where one is trained, as a version; rank 0 returns what it wrote."""
        engine, is_adapter = self.engine, self._config.actor.use_lora
        tensors = engine.full_lora_state_dict() if is_adapter else engine.full_state_dict()
        self._rest()
        if engine.rank != 0:
            return None
        if self._store is None:
            raise RuntimeError("the weights folder is not open")
        if is_adapter:
            return self._store.write_adapter(version, parent, tensors.items(), engine.lora_config())
        if self.sender is not None:
            self.sender.hold(version, tensors)
        return self._store.write(version, parent, tensors.items())

    def open_weights(self, term: int) -> None:
        """Take over the weights folder; only rank 0 writes there. An adapter's base is written here, once."""
        base = self.engine.full_base_state_dict() if self._config.actor.use_lora else {}
        if self.engine.rank == 0:
            self._store = WeightStore(self._config.paths.weights, static_files(self._config, self.engine))
            self._store.remove_leftovers(term)
            if base:
                self._store.write_base(base.items())

    def remove_weights(self, needed: Sequence[PolicyVersion], keep_newest: int) -> None:
        """Remove versions that no server needs."""
        if self._store is not None:
            self._store.remove_except(needed, keep_newest)

    def export(self, version: PolicyVersion, root: Path, keep_last: int | None) -> Path | None:
        """Keep a written version as an export of the model; an adapter is merged into it."""
        merged = self.engine.full_state_dict() if self._config.actor.use_lora else None
        if self._store is None:
            return None
        return self._store.export(version, root, keep_last, merged.items() if merged else None)

    def save(self, folder: Path) -> "Future[None]":
        """Copy this rank's part of a checkpoint, and begin to write it; the ranks write together, beside training.

        Returns:
            What ends on rank 0 when all ranks have written.
        """
        if self._saving is not None:
            self._saving.result()
        copied = copy_tensors(self.engine.state_dict())
        self._rest()
        self._saving = in_background("save", lambda: save_tensors(folder, copied, self._save_group))
        return self._saving

    def _rest(self) -> None:
        """Until the next step nothing computes: leave the GPU to others, where the file says so."""
        if self._config.enable_offload:
            self.engine.offload()

    def restore(self, folder: Path, step: int) -> None:
        """Load this rank's part of a checkpoint."""
        state = self.engine.state_dict()
        load_tensors(folder, state)
        self.engine.load_state_dict(state)
        self.engine.version = step

    def close(self) -> None:
        if self._token_dump is not None:
            self._token_dump.close()
        if self._store is not None:
            self._store.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def _threads_of_warm_start() -> Iterator[None]:
    """Use HEADWAY_WARM_START_THREADS threads, where it is set: engines on this machine wait for the first version."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("HEADWAY_WARM_START_THREADS") or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
