"""Find a stop string that a server could not see: it began in an earlier piece, or the server has no tokenizer."""

from collections.abc import Callable, Sequence

TOKENS_PER_CHARACTER = 4
"""A character of four bytes may take four tokens."""


def cut_at_stop(
    ids: Sequence[int], start: int, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[int, str] | None:
    """How many tokens to keep, more than `start`, such that the text ends with a stop string; and which one it is.

    Example:
        >>> cut_at_stop([65, 66, 67, 68], 2, ["BC"], lambda ids: "".join(map(chr, ids)))
        (3, 'BC')
    """
    window = max(0, start - TOKENS_PER_CHARACTER * max(map(len, stops)))
    if _found(decode(ids[window:]), stops) is None:
        return None
    low, high = start + 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _found(decode(ids[window:middle]), stops) is None:
            low = middle + 1
        else:
            high = middle
    matched = _found(decode(ids[window:low]), stops)
    return None if matched is None else (low, matched)


def _found(text: str, stops: Sequence[str]) -> str | None:
    return next((stop for stop in stops if stop in text), None)
