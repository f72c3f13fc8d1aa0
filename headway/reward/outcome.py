"""What one scored item can end as, and which values are rewards.

A reward is a finite number: integers, booleans and numpy's scalars count, `None`, NaN, infinities and strings do not.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real


class ScoreStatus(StrEnum):
    """Why an item ended; the names of the wire's ScoreStatus."""

    OK = "ok"
    TIMEOUT = "timeout"
    """Ran past its limit; its worker was killed."""
    ERROR = "error"
    """The function raised, or its worker died."""
    KILLED_MEMORY = "killed_memory"
    """Used more memory than its limit."""
    INVALID_OUTPUT = "invalid_output"
    """Returned something that is no finite number."""
    ABSTAIN = "abstain"
    """The function declined to judge."""


class Abstain(Exception):
    """Raised by a reward function that declines to judge an item; its message is the reason."""


class InvalidOutput(Exception):
    """The function returned something that is no reward."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one item ended; `reward` has a meaning only when the status is OK."""

    status: ScoreStatus
    reward: float = 0.0
    message: str = ""
    parts: dict[str, float] = field(default_factory=dict)


def as_reward(value: object) -> float:
    """The number in what a reward function returned.

    Raises:
        InvalidOutput: It is no finite number.

    Example:
        >>> as_reward(True), as_reward(3)
        (1.0, 3.0)
    """
    number = _unwrapped(value)
    if not isinstance(number, Real):
        raise InvalidOutput(f"a reward is a finite number, not {_short(value)}")
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InvalidOutput(f"a reward is a finite number, not {reward}")
    return reward


def _unwrapped(value: object) -> object:
    """Arrays and tensors of a single element count as that element."""
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    is_single = isinstance(shape, tuple) and all(length == 1 for length in shape)
    return item() if is_single and callable(item) else value


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 120 else text[:117] + "..."
