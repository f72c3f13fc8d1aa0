"""A checkpoint is written beside training: the state of its own step; nothing is forgotten before it is whole."""

import asyncio
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from safetensors.numpy import load_file
from test_trainer_service import train_to_the_end
from trainer_harness import stage

from headway.core.version import PolicyVersion
from services.trainer.checkpoint import CheckpointStore, TrainerRecord, copy_tensors, find_fault, load_tensors

STEPS = 4
SLOW = PolicyVersion(1, 2)
RECOVER = {"recover": {"mode": "auto", "freq_steps": 2, "keep_last": 2}}


async def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    go_on = threading.Event()
    complete = CheckpointStore.complete

    def slow(self: CheckpointStore, aside: Path, record: TrainerRecord) -> Path:
        if record.version == SLOW:
            go_on.wait()
        return complete(self, aside, record)

    async with stage(tmp_path, steps=STEPS, **RECOVER) as trial:
        with patch.object(CheckpointStore, "complete", slow):
            training = asyncio.create_task(train_to_the_end(trial))
            await trial.controller.until(lambda seen: 3 in seen.committed)
            forgotten, named = trial.controller.forgotten_before, (trial.config.paths.recover / SLOW.label).exists()
            go_on.set()
            await training
        path = trial.config.paths.recover / SLOW.label
        published = load_file(trial.config.paths.weights / SLOW.label / "model.safetensors")
        later = load_file(trial.config.paths.weights / f"v1.{STEPS}" / "model.safetensors")
    assert (forgotten, named) == (0, False)
    assert trial.controller.forgotten_before == STEPS
    assert find_fault(path) is None
    saved = {name: torch.empty(value.shape) for name, value in published.items()}
    load_tensors(path, {"model": saved})
    assert all(np.array_equal(saved[name].numpy(), published[name]) for name in published)
    assert any(not np.array_equal(later[name], published[name]) for name in published)


def test_what_is_copied_does_not_move_any_more() -> None:
    state = {"model": {"weight": torch.zeros(3)}, "lr_step": torch.tensor(1)}
    copied = copy_tensors(state)
    state["model"]["weight"].add_(1)
    state["lr_step"].add_(1)
    assert copied["model"]["weight"].tolist() == [0, 0, 0]
    assert copied["lr_step"] == 1
