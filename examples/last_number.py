"""A chat task that a small instruct model learns in minutes: name the last number of a list of four."""

import random
from typing import TypedDict


class Message(TypedDict):
    role: str
    content: str


class Row(TypedDict):
    messages: list[Message]
    answer: str


def rows(split: str = "train", seed: int = 0, size: int = 1024) -> list[Row]:
    """Chat rows {"messages", "answer"}; "test" is made from another seed.

    Example:
        >>> rows("test", size=1)[0]["messages"][0]["content"]
        'What is the last number in this list: 87, 11, 73, 74?'
    """
    rng = random.Random(seed if split == "train" else 999)
    return [_row([rng.randint(1, 99) for _ in range(4)]) for _ in range(size if split == "train" else 64)]


def _row(numbers: list[int]) -> Row:
    question = f"What is the last number in this list: {', '.join(map(str, numbers))}?"
    return {"messages": [{"role": "user", "content": question}], "answer": str(numbers[-1])}
