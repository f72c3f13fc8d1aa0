"""The example agent, whole: its calls through the `openai` client become trajectories; it learns to use its tool."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_calculator_agent_learns(tmp_path: Path) -> None:
    overrides = [f"cluster.fileroot={tmp_path}", "services.controller_http_port=0", "rollout.dump_to_file=true"]
    command = [sys.executable, "-m", "headway", "up", "examples/agent/calculator.yaml", *overrides]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (before, after) = map(float, re.findall(r"held-out reward ([\d.]+) -> ([\d.]+)", ended.stdout)[0])
    assert after > before + 0.2, ended.stdout
    assert "discards: none; tasks conserved: yes" in ended.stdout
    samples = [json.loads(line) for file in tmp_path.rglob("samples.jsonl") for line in file.read_text().splitlines()]
    assert any("<|im_start|>tool" in sample["completion"] and sample["reward"] == 1.0 for sample in samples)
    for sample in samples:
        assert [version >= 0 for version in sample["versions"]] == sample["loss_mask"]
