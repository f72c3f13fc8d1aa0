"""Several ranks train one model: rank 0 speaks, the others follow, and a run may go on with another number of them."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainer_harness import BATCH, ROOT, Stage, stage

from services.trainer import app

STEPS = 3
DEADLINE_S = 110.0
RECOVER = {"recover": {"mode": "auto", "freq_steps": 1, "freq_secs": None, "freq_epochs": None}}
VALID = {
    "valid_dataset": {"path": "python:examples.sort_digits.rows", "split": "test", "max_rows": 3},
    "warm_start": {"steps": 2, "batch_size": 4, "lr": 1e-3},
}


async def torchrun(trial: Stage, ranks: int) -> None:
    """Train to the end in processes of their own."""
    allocation = f"allocation_mode=sglang:d1+d{ranks}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "services.trainer"]
    options = [f"--config={trial.config_file}", f"--name-resolve={trial.name_resolve}", allocation]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *launch, *options, env=environment, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert output.count(b"HEADWAY_READY") == ranks


def weights(trial: Stage, label: str) -> dict[str, np.ndarray]:
    return load_file(trial.config.paths.checkpoints / label / "model.safetensors")


@pytest.mark.slow
async def test_two_ranks_train_as_one_and_one_goes_on_where_two_stopped(tmp_path: Path) -> None:
    async with stage(tmp_path / "one", steps=STEPS, **VALID) as trial:
        async with app.run(trial.config, trial.placement()) as running:
            await running.supervisor.wait()
        alone = weights(trial, f"v1.{STEPS}")
    async with stage(tmp_path / "two", steps=STEPS, total_train_steps=2, **VALID, **RECOVER) as trial:
        await torchrun(trial, ranks=2)
        assert len(trial.controller.consumed) == 2 * BATCH
        longer = trial.config.model_copy(update={"total_train_steps": STEPS})
        async with app.run(longer, trial.placement()) as running:
            await running.supervisor.wait()
        together = weights(trial, f"v2.{STEPS}")
    for name, expected in alone.items():
        np.testing.assert_allclose(together[name], expected, rtol=1e-4, atol=1e-5)
