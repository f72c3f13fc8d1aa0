"""Dumps as the controller and the trainer write them, with few tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson


def sample_line(task_id: str, sample: int, reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """A line of samples.jsonl: a prompt of two tokens, a completion of two."""
    line = {
        "task_id": task_id, "sample": sample, "attempt": 1, "outcome": "accepted", "reward": reward,
        "stop_reason": "stop", "version_min": 3, "version_max": 4, "seqlen": 4, "prompt_len": 2, "num_loss_tokens": 2,
        "prompt": f"prompt of {task_id}: ", "completion": 'yes, "token_ids":[', "metrics": {},
        "token_ids": [5, 6, 7, 8], "logprobs": [0.0, 0.0, -0.5, -1.0], "versions": [-1, -1, 3, 4],
        "loss_mask": [0, 0, 1, 1],
    }  # fmt: skip
    return line | changes


def trained_line(task_id: str, sample: int, step: int, **changes: Any) -> dict[str, Any]:
    """A line of trained.jsonl for such a sample."""
    line = {
        "step": step, "task_id": task_id, "sample": sample, "reward": 0.5, "start": 2, "loss_mask": [1, 1],
        "advantages": [1.0, -1.0], "prox_logp": [-0.25, -1.5], "logp": [-0.25, -2.0],
    }  # fmt: skip
    return line | changes


def encoded(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)


def append(root: Path, step: int, lines: Sequence[dict[str, Any]], name: str = "samples.jsonl") -> Path:
    """Append to a dump of a step."""
    path = root / str(step) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encoded(lines))
    return path


def group(task_id: str, rewards: Sequence[float], **changes: Any) -> list[dict[str, Any]]:
    """The lines of a group."""
    return [sample_line(task_id, number, reward, **changes) for number, reward in enumerate(rewards)]
