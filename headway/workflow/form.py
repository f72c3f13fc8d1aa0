"""Check the form of what a workflow returns, before it is converted: `rollout.check_trajectory_format`.

Conversion takes what it can make sense of: 3.0 becomes token 3, and a mask of 0.5 becomes true. Here that is refused,
and the first fault is named by its place: `result[1]: loss_mask has values other than 0 and 1`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.trajectory import Trajectory
from headway.errors import InvalidInput
from headway.workflow.api import EpisodeResult
from headway.workflow.convert import ARRAYS, DTYPES, as_array

WHOLE = ("input_ids", "versions")
MASKS = ("loss_mask", "attention_mask")


def check_form(result: EpisodeResult, place: str = "result") -> None:
    """Check shapes, lengths and types.

    Raises:
        InvalidInput: The first fault, with its place.
    """
    if isinstance(result, Trajectory):
        _check_trajectory(result, place)
    elif isinstance(result, Mapping):
        _check_dict(result, place)
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        for number, part in enumerate(result):
            check_form(part, f"{place}[{number}]")
    elif result is not None:
        raise InvalidInput(f"{place} is a {type(result).__name__}; expected a Trajectory, a dict, a list, or None")


def _check_trajectory(trajectory: Trajectory, place: str) -> None:
    for name in ARRAYS:
        array = getattr(trajectory, name)
        if not isinstance(array, np.ndarray) or array.dtype != DTYPES[name]:
            kind = array.dtype.name if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidInput(f"{place}: {name} is of type {kind}; expected an array of {np.dtype(DTYPES[name])}")
        _check_shape(name, array, (len(trajectory.input_ids),), place)
        _check_values(name, array, place)
    _check_number("reward", trajectory.reward, place)
    for name, value in trajectory.metrics.items():
        _check_number(f"metrics[{name!r}]", value, place)


def _check_dict(result: Mapping[str, Any], place: str) -> None:
    missing = [name for name in (*ARRAYS, "rewards") if name not in result]
    if missing:
        raise InvalidInput(f"{place} lacks {', '.join(missing)}; it has {', '.join(sorted(result))}")
    shape = _array("input_ids", result, place).shape
    if len(shape) not in (1, 2) or 0 in shape:
        raise InvalidInput(f"{place}: input_ids has shape {list(shape)}; expected [L] or [n, L], L of 1 or more")
    for name in (*ARRAYS, *(["attention_mask"] if "attention_mask" in result else [])):
        array = _array(name, result, place)
        _check_shape(name, array, shape, place)
        _check_kind(name, array, place)
        _check_values(name, array, place)
    rewards = _array("rewards", result, place)
    if rewards.size != (1 if len(shape) == 1 else shape[0]):
        raise InvalidInput(f"{place}: rewards has shape {list(rewards.shape)}; expected one for each sequence")
    if not np.isfinite(rewards).all():
        raise InvalidInput(f"{place}: rewards has values that are no finite number")


def _array(name: str, result: Mapping[str, Any], place: str) -> NDArray[Any]:
    try:
        return as_array(result[name])
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {name}: {error}") from error


def _check_shape(name: str, array: NDArray[Any], shape: tuple[int, ...], place: str) -> None:
    if array.shape != shape:
        raise InvalidInput(f"{place}: {name} has shape {list(array.shape)}, input_ids has {list(shape)}")


def _check_kind(name: str, array: NDArray[Any], place: str) -> None:
    kinds = "iu" if name in WHOLE else "biuf" if name in MASKS else "f"
    if array.dtype.kind not in kinds:
        expected = "whole numbers" if name in WHOLE else "floating-point numbers"
        raise InvalidInput(f"{place}: {name} holds {array.dtype.name}; expected {expected}")


def _check_values(name: str, array: NDArray[Any], place: str) -> None:
    if name == "input_ids" and array.size and array.min() < 0:
        raise InvalidInput(f"{place}: input_ids has {array.min()}; a token id is 0 or more")
    if name == "versions" and array.size and array.min() < -1:
        raise InvalidInput(f"{place}: versions has {array.min()}; expected a step, or -1 where there is none")
    if name in MASKS and not np.isin(array, (0, 1)).all():
        raise InvalidInput(f"{place}: {name} has values other than 0 and 1")


def _check_number(name: str, value: Any, place: str) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value):
        raise InvalidInput(f"{place}: {name} is {value!r}; expected a finite number")
