"""Finished groups as lines of JSON that people and tools can read: one line a sample.

    {folder}/{step}/samples.jsonl        step: that of the newest version that made a token of the group

Groups that the filter refused are there too, with outcome `rejected`. A task that was rolled out again has lines of
every attempt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headway.core.trajectory import Outcome, Trajectory
from headway.workflow.api import Tokenizer

FILE = "samples.jsonl"
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose samples are all there."""

    task_id: str
    attempt: int
    outcome: Outcome
    """Accepted, or rejected by the filter."""
    trajectories: Sequence[Trajectory]


class Dump:
    """Encodes groups.

    Args:
        folder: Where the files are.
        load: Loads a tokenizer of its own: one that workflows use must not be used in another thread.
    """

    def __init__(self, folder: Path, load: Callable[[], Tokenizer]) -> None:
        self._folder = folder
        self._load = load

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()

    def encode(self, groups: Sequence[FinishedGroup]) -> Mapping[Path, bytes]:
        """The lines of these groups by file."""
        lines: dict[Path, list[bytes]] = {}
        for group in groups:
            path = self._folder / str(newest_step(group.trajectories)) / FILE
            lines.setdefault(path, []).extend(self._lines(group))
        return {path: b"".join(parts) for path, parts in lines.items()}

    def _lines(self, group: FinishedGroup) -> Iterator[bytes]:
        prompts: dict[bytes, str] = {}
        for number, trajectory in enumerate(group.trajectories):
            prompt_ids = trajectory.input_ids[: prompt_length(trajectory)]
            key = prompt_ids.tobytes()
            if key not in prompts:
                prompts[key] = self._tokenizer.decode(prompt_ids.tolist())
            yield orjson.dumps(self._record(group, number, trajectory, prompts[key], len(prompt_ids)), option=OPTIONS)

    def _record(
        self, group: FinishedGroup, number: int, trajectory: Trajectory, prompt: str, prompt_len: int
    ) -> dict[str, Any]:
        made = trajectory.versions[trajectory.loss_mask]
        return {
            "task_id": group.task_id,
            "sample": number,
            "attempt": group.attempt,
            "outcome": group.outcome,
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason,
            "version_min": int(made.min()) if len(made) else None,
            "version_max": int(made.max()) if len(made) else None,
            "seqlen": len(trajectory),
            "prompt_len": prompt_len,
            "num_loss_tokens": len(made),
            "prompt": prompt,
            "completion": self._tokenizer.decode(trajectory.input_ids[prompt_len:].tolist()),
            "metrics": trajectory.metrics,
            "token_ids": np.ascontiguousarray(trajectory.input_ids),
            "logprobs": np.ascontiguousarray(trajectory.logprobs),
            "versions": np.ascontiguousarray(trajectory.versions),
            "loss_mask": trajectory.loss_mask.astype(np.uint8),
        }


def prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first generated one; all of them when there is none."""
    first = int(trajectory.loss_mask.argmax())
    return first if trajectory.loss_mask[first] else len(trajectory)


def newest_step(trajectories: Sequence[Trajectory]) -> int:
    """Step of the newest version that made a token; 0 when none was made."""
    return max(0, *(int(trajectory.versions.max()) for trajectory in trajectories))
