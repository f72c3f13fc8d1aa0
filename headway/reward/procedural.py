"""reasoning-gym's procedural tasks: each judges answers by its own rule."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from headway.errors import InvalidInput
from headway.reward.registry import reward_function

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward_function(is_pure=True, typical_s=5e-4, imports=("reasoning_gym",))
def reasoning_gym(completion: str, **data: Any) -> float:
    """What the task itself says of the stated answer: in the last <answer>, the last box, or the whole completion."""
    name = (data.get("metadata") or {}).get("source_dataset") or data.get("source_dataset")
    if not name:
        raise InvalidInput("the row has no metadata.source_dataset: it was not made by reasoning_gym")
    return float(_scorer(str(name))(stated_answer(completion), data))


def stated_answer(completion: str) -> str:
    """The answer in a completion.

    Example:
        >>> stated_answer("I think <answer> 4 </answer>"), stated_answer("so \\\\boxed{12}."), stated_answer(" 7\\n")
        ('4', '12', '7')
    """
    tagged = TAGGED.findall(completion)
    if tagged:
        return str(tagged[-1]).strip()
    boxed = completion.rpartition("\\boxed{")
    return boxed[2].partition("}")[0].strip() if boxed[1] else completion.strip()


@lru_cache(maxsize=128)
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym as gym

    try:
        scorer: Callable[[str, dict[str, Any]], float] = gym.get_score_answer_fn(name)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    return scorer
