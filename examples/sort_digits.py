"""The quickstart's task: sort eight digits. `sort 48210375=` is answered by `01234578`.

Rows are made from a seed. The held-out rows come first from their own seed, and no training row repeats one of them.
"""

import random

HELD_OUT_SEED = 12345
NUM_HELD_OUT = 256
NUM_TRAIN = 20_000


def rows(split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt", "answer"} of a split, "train" or "test".

    Example:
        >>> rows("test")[0]
        {'prompt': 'sort 60453496=', 'answer': '03445669'}
    """
    held_out = _make(random.Random(HELD_OUT_SEED), NUM_HELD_OUT, frozenset())
    if split != "train":
        return held_out
    return _make(random.Random(seed), NUM_TRAIN, frozenset(row["prompt"] for row in held_out))


def _make(rng: random.Random, size: int, left_out: frozenset[str]) -> list[dict[str, str]]:
    made: list[dict[str, str]] = []
    while len(made) < size:
        digits = "".join(rng.choice("0123456789") for _ in range(8))
        prompt = f"sort {digits}="
        if prompt not in left_out:
            made.append({"prompt": prompt, "answer": "".join(sorted(digits))})
    return made
