"""Supervised fine-tuning: the warm start's plan, alone, with the held-out loss before and after.

Every rank runs the same code on the same plan; rank 0 speaks and writes.
"""

import logging
import math
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch.distributed as dist

from headway.algorithm.batch import SampleBatch
from headway.config import ExperimentConfig
from headway.config.actor import WarmStartConfig
from headway.core.trajectory import NO_VERSION, Group, Trajectory
from headway.data import Dataset, open_dataset
from headway.errors import InvalidInput
from headway.runtime.published import MANIFEST
from services.trainer.data import load_tokenizer
from services.trainer.distributed import start_process_group
from services.trainer.engine import TrainEngine
from services.trainer.files import write_file
from services.trainer.model_files import static_files
from services.trainer.warm_start import Sequence32, encode_rows, plan_warm_start
from services.trainer.weights import write_folder

HELD_OUT_ROWS = 256
LINES = 20
"""How many lines of progress there are, about."""
log = logging.getLogger(__name__)


def fine_tune(config: ExperimentConfig, output: Path | None = None) -> Path:
    """Train, and write the model; returns its folder, which is replaced.

    Raises:
        InvalidInput: The model, the tokenizer or the rows cannot be used, or the folder holds something else.
    """
    output = output or config.paths.checkpoints / "sft"
    check_output(output)
    start_process_group()
    settings = config.warm_start or WarmStartConfig()
    config = config.model_copy(update={"warm_start": settings})
    tokenizer = load_tokenizer(config.tokenizer_path)
    train = open_dataset(config.train_dataset, tokenizer, config.seed)
    valid = open_dataset(config.valid_dataset, tokenizer, config.seed) if config.valid_dataset is not None else None
    plan = plan_warm_start(config, train, valid, tokenizer)
    engine = TrainEngine(config, total_train_steps=max(settings.steps, 1))
    held_out = encode_rows(answered(valid), tokenizer) if valid is not None else []
    _say(engine, f"{train.report()}; {settings.steps} steps of {settings.batch_size} rows")
    _say(engine, f"step 0/{settings.steps}{_held_out_text(engine, held_out)}")
    every = max(1, math.ceil(settings.steps / LINES))
    with engine.supervised(lr=plan.lr, num_steps=settings.steps):
        for number, rows in enumerate(plan.steps, start=1):
            sequences = [plan.sequences[row] for row in rows]
            stats = engine.sft_step(sequences, label_smoothing=plan.label_smoothing).stats
            if number % every == 0:
                loss, norm = stats["sft/loss"], stats["sft/grad_norm"]
                _say(engine, f"step {number}/{settings.steps} loss {loss:.4f} grad {norm:.3f}")
    _say(engine, f"step {settings.steps}/{settings.steps}{_held_out_text(engine, held_out)}")
    return _write(config, engine, output)


def check_output(output: Path) -> None:
    """Refuse, before anything is trained, to replace a folder that this command did not write.

    Raises:
        InvalidInput: It holds something else.
    """
    if output.exists() and not (output.is_dir() and ((output / MANIFEST).exists() or not any(output.iterdir()))):
        raise InvalidInput(f"{output} exists and is no model of `headway sft`: choose another --output")


def answered(dataset: Dataset) -> list[dict[str, object]]:
    """The first rows of a dataset that have an answer."""
    rows = (row for row in dataset.rows if row.get("answer") is not None)
    return list(islice(rows, HELD_OUT_ROWS))


def held_out_loss(engine: TrainEngine, sequences: Sequence[Sequence32]) -> float:
    """Mean negative log-probability of the answers' tokens, natural units. Collective."""
    groups = []
    for number, (ids, mask) in enumerate(sequences):
        versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
        sample = Trajectory(ids, np.zeros(len(ids), np.float32), mask, versions, 0.0)
        groups.append(Group(f"row {number}", (sample,)))
    batch = SampleBatch.from_groups(groups)
    return float(-engine.compute_logp(batch)[batch.loss_mask].mean())


def _held_out_text(engine: TrainEngine, sequences: Sequence[Sequence32]) -> str:
    return f" held-out loss {held_out_loss(engine, sequences):.4f}" if sequences else ""


def _say(engine: TrainEngine, text: str) -> None:
    if engine.rank == 0:
        log.info("%s", text)


def _write(config: ExperimentConfig, engine: TrainEngine, output: Path) -> Path:
    tensors = engine.full_state_dict()
    if engine.rank == 0:
        if output.exists():
            shutil.rmtree(output)
        files = static_files(config, engine)
        write_folder(
            output,
            {"parent": config.actor.path},
            tensors.items(),
            lambda folder: [write_file(folder / name, [memoryview(data)]) for name, data in files.items()],
        )
        log.info("the model is saved at %s", output)
    if dist.is_initialized():
        dist.barrier()
    return output
