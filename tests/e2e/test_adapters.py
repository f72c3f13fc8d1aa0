"""The quickstart with an adapter (LoRA) in place of the whole model: reward rises, and the base travels once."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from test_quickstart import ROOT, headway_up

STEPS = 16


async def fine_tuned(folder: Path) -> Path:
    """The quickstart's model after its warm start: an adapter cannot teach random weights."""
    command = ["-m", "headway", "sft", "configs/quickstart.yaml", "--output", str(folder)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    return folder


@pytest.mark.timeout(600)
async def test_an_adapter_learns_and_only_it_travels(tmp_path: Path) -> None:
    model = await fine_tuned(tmp_path / "model")
    overrides = (
        "warm_start=null", f"actor.path={model}", "actor.init_from_scratch=false", "actor.use_lora=true",
        "actor.lora_rank=16", "actor.lora_alpha=32", "actor.optimizer.lr=2e-3", f"total_train_steps={STEPS}",
    )  # fmt: skip
    files = tmp_path / "files"
    async with headway_up(files, *overrides) as launch:
        assert await launch.end(timeout_s=500) == 0, launch.text
    (stats,) = files.rglob("stats.jsonl")
    lines = [json.loads(line) for line in stats.read_text().splitlines()]
    held_out = [line["eval/task_reward/avg"] for line in lines if "eval/task_reward/avg" in line]
    assert held_out[-1] > held_out[0] + 0.1, held_out
    assert "server_lost" not in launch.text
    (base,) = files.glob("weights/**/base-*")
    for version in base.parent.glob(f"v1.{STEPS}"):
        assert sum(file.stat().st_size for file in version.iterdir()) * 4 < (base / "model.safetensors").stat().st_size
