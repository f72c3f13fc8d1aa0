"""Compare mathematical answers by meaning: math-verify, which is sympy behind a grammar of LaTeX.

It may take for ever on some inputs and has no useful limit of its own, so it belongs in a process that can be killed.
"""

from functools import lru_cache
from typing import Any

from headway.reward.reference import reference_answer
from headway.reward.registry import reward_function


@reward_function(is_pure=True, typical_s=0.002, imports=("math_verify",))
def math(completion: str, **data: Any) -> bool:
    """The final answer means the same as the reference: in a box, after `####`, or the last expression."""
    import math_verify

    gold = _parsed_reference(reference_answer(data))
    answer = math_verify.parse(completion, parsing_timeout=None)
    return bool(math_verify.verify(gold, answer, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed_reference(reference: str) -> list[Any]:
    import math_verify

    text = reference.rpartition("####")[2].strip()
    parsed = math_verify.parse(text, parsing_timeout=None)
    return list(parsed or math_verify.parse(f"${text}$", parsing_timeout=None))
