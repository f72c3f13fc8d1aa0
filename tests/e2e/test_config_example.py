"""AReaL's example, scaled down by overrides alone, runs on CPU: a train step, an evaluation, a save, and a recovery.

Everything is real but small: a model of 0.9 M parameters with random weights, and a few rows in GSM8K's columns.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"what is {n} + {n}?", "answer": f"twice {n} is {2 * n}.\n#### {2 * n}"} for n in range(12)]


def headway_up(folder: Path, *overrides: str) -> str:
    """Run the example to its end; what it has printed."""
    scaled_down = [
        "actor.path=configs/models/sort_digits",
        "actor.init_from_scratch=true",
        "actor.dtype=float32",
        "actor.weight_update_mode=disk",
        "actor.mb_spec.max_tokens_per_mb=2048",
        f"train_dataset.path={folder}/rows",
        f"valid_dataset.path={folder}/rows",
        "train_dataset.batch_size=4",
        "gconfig.max_new_tokens=16",
        "train_dataset.max_length=100",
        "allocation_mode=sglang:d1+d1",
        "inference.engine=builtin",
        "cluster.n_gpus_per_node=0",
        f"cluster.fileroot={folder}",
        "cluster.name_resolve.type=etcd3",
        "services.controller_http_port=0",
        "evaluator.freq_steps=1",
        "saver.freq_steps=1",
        "recover.mode=auto",
        "recover.freq_steps=1",
    ]
    program = str(Path(sys.executable).with_name("headway"))
    argv = [program, "up", "configs/gsm8k_grpo.yaml", *scaled_down, *overrides]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_evaluates_saves_and_recovers(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in ROWS)
        (tmp_path / "rows" / f"{split}.jsonl").write_text(text, "utf-8")

    headway_up(tmp_path, "total_train_steps=1")
    (run,) = tmp_path.glob("run/*/gsm8k-grpo/trial0")
    report = json.loads((run / "report.json").read_text("utf-8"))
    assert (report["num_steps"], report["tasks"]["consumed"]) == (1, 4)
    assert report["held_out_after"] is not None
    assert (run / "config.yaml").exists(), "the resolved file is saved with the run"
    (saved,) = tmp_path.glob("checkpoints/*/gsm8k-grpo/trial0/v1.1")
    assert (saved / "model.safetensors").exists()

    headway_up(tmp_path, "total_train_steps=2")
    (log,) = tmp_path.glob("logs/*/gsm8k-grpo/trial0/trainer-0.log")
    assert "continues from checkpoint" in log.read_text("utf-8")
    report = json.loads((run / "report.json").read_text("utf-8"))
    assert report["num_steps"] == 2
