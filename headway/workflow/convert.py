"""From whatever a workflow returns to trajectories: ours, AReaL-style dicts of arrays, several of them, or None.

An AReaL-style dict has the keys below as torch tensors, numpy arrays or lists, of shape [L] or [n, L]. Torch is not
imported: a tensor is known by its methods.

    input_ids  logprobs  loss_mask  versions  rewards       attention_mask (optional: which tokens are there)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.trajectory import StopReason, Trajectory
from headway.errors import InvalidInput
from headway.workflow.api import EpisodeResult
from headway.workflow.errors import RewardFailed

ARRAYS = ("input_ids", "logprobs", "loss_mask", "versions")
DTYPES = {"input_ids": np.int32, "logprobs": np.float32, "loss_mask": np.bool_, "versions": np.int32}
MAX_LOGPROB = 1e-3
"""A log-probability is never positive; rounding in low precision is allowed for."""


def as_trajectories(result: EpisodeResult) -> list[Trajectory]:
    """The trajectories of one episode; none of them when the workflow rejected it.

    Raises:
        InvalidInput: The result is of no known form, or its parts contradict each other; the message names the part.
        RewardFailed: A reward is no finite number.
    """
    if result is None:
        return []
    if isinstance(result, Trajectory):
        return [_checked(result)]
    if isinstance(result, Mapping):
        return [_checked(trajectory) for trajectory in _rows(result)]
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        return [trajectory for part in result for trajectory in as_trajectories(part)]
    raise InvalidInput(
        f"a workflow returned {type(result).__name__}; it may return a Trajectory, a dict, a list, or None"
    )


def _rows(result: Mapping[str, Any]) -> Iterator[Trajectory]:
    """One trajectory a row."""
    missing = [name for name in (*ARRAYS, "rewards") if name not in result]
    if missing:
        raise InvalidInput(f"a workflow's dict lacks {', '.join(missing)}; it has {', '.join(sorted(result))}")
    arrays = {name: np.atleast_2d(as_array(result[name])) for name in ARRAYS}
    shape = arrays["input_ids"].shape
    present = np.atleast_2d(as_array(result.get("attention_mask", np.ones(shape)))).astype(np.bool_)
    for name, array in {**arrays, "attention_mask": present}.items():
        if array.shape != shape:
            raise InvalidInput(f"`{name}` has shape {list(array.shape)}, `input_ids` has {list(shape)}")
    rewards = _rewards(result["rewards"], shape[0])
    for row, reward in enumerate(rewards):
        parts = {name: array[row][present[row]].astype(DTYPES[name]) for name, array in arrays.items()}
        yield Trajectory(**parts, reward=reward, stop_reason=StopReason(result.get("stop_reason", StopReason.STOP)))


def _rewards(value: Any, rows: int) -> list[float]:
    rewards = as_array(value).reshape(-1)
    if len(rewards) != rows:
        raise InvalidInput(f"`rewards` has {len(rewards)} values for {rows} sequences; it holds one a sequence")
    return [float(reward) for reward in rewards]


def as_array(value: Any) -> NDArray[Any]:
    """A numpy array of a list, an array, or a tensor (known by its methods, wherever it lives)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInput(f"a workflow's dict holds a ragged list: {error}") from error
    if array.dtype.kind not in "biuf":
        kind = type(value).__name__
        raise RewardFailed("a reward is None") if value is None else InvalidInput(f"{kind} holds no numbers")
    return array


def _checked(trajectory: Trajectory) -> Trajectory:
    """Refuse what would become a silently wrong gradient."""
    lengths = {name: len(getattr(trajectory, name)) for name in ARRAYS}
    if len(set(lengths.values())) != 1 or not len(trajectory):
        raise InvalidInput(f"a trajectory's arrays must have one length, not 0: {lengths}")
    if trajectory.input_ids.min() < 0:
        raise InvalidInput(f"`input_ids` has {trajectory.input_ids.min()}; a token id is 0 or more")
    mask = trajectory.loss_mask
    logprobs = trajectory.logprobs[mask]
    if not np.isfinite(logprobs).all() or (logprobs > MAX_LOGPROB).any():
        raise InvalidInput("`logprobs` of generated tokens must be finite and not positive")
    if (trajectory.versions[mask] < 0).any():
        raise InvalidInput("`versions` of generated tokens must be 0 or more; -1 is for prompts and tool output")
    if not np.isfinite(trajectory.reward):
        raise RewardFailed(f"a reward is {trajectory.reward}, no finite number")
    return trajectory
