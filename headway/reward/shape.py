"""Functions of a completion's form rather than its content: a pattern, a length."""

import re
from typing import Any

from headway.reward.registry import reward_function


@reward_function(is_pure=True, typical_s=5e-5)
def format(completion: str, pattern: str = "", **data: Any) -> bool:
    """The regular expression `pattern` is found in the completion.

    `.` matches line ends too. A pattern may take for ever on some completions; the pool ends that.
    """
    if not pattern:
        raise ValueError("`format` needs a `pattern`, in reward.kwargs or in the row")
    return re.search(pattern, completion, re.DOTALL) is not None


@reward_function(is_pure=True, typical_s=2e-5)
def length(
    completion: str,
    completion_ids: list[int],
    min_tokens: int = 0,
    max_tokens: int | None = None,
    min_chars: int = 0,
    max_chars: int | None = None,
    slope: int = 0,
    **data: Any,
) -> float:
    """1 while the length is within its bounds; beyond, it falls to 0 over `slope` tokens or characters."""
    excess = max(
        _excess(len(completion_ids), min_tokens, max_tokens),
        _excess(len(completion), min_chars, max_chars),
    )
    return 1.0 if excess == 0 else max(0.0, 1.0 - excess / slope) if slope > 0 else 0.0


def _excess(number: int, least: int, most: int | None) -> int:
    return max(0, least - number, 0 if most is None else number - most)
