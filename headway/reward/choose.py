"""Choose the reward function from the dataset, when the experiment file names none.

First the dataset's name, then what a row holds. Pure.
"""

import re
from collections.abc import Mapping
from typing import Any

BY_DATASET = (
    (r"^reasoning_gym:", "reasoning_gym"),
    (r"gsm8k|gsm-8k", "gsm8k"),
    (r"countdown", "countdown"),
    (r"mbpp|humaneval|human-eval|livecodebench|codecontests|code_contests|apps\b|taco\b|leetcode", "code"),
    (r"mmlu|gpqa|\barc\b|ai2_arc|hellaswag|commonsense_qa|openbookqa|medqa|sciq", "multiple_choice"),
    (r"math|aime|amc|olympiad|minerva|deepscaler|orz|numina", "math"),
)
"""Patterns of dataset paths, and the function that scores their rows; the first that is found decides."""

BY_COLUMNS = (
    (frozenset({"source_dataset", "metadata"}), "reasoning_gym"),
    (frozenset({"nums", "target"}), "countdown"),
    (frozenset({"nums", "answer"}), "countdown"),
    (frozenset({"test_list"}), "code"),
    (frozenset({"tests"}), "code"),
    (frozenset({"input_output"}), "code"),
    (frozenset({"choices"}), "multiple_choice"),
    (frozenset({"options"}), "multiple_choice"),
    (frozenset({"pattern"}), "format"),
)
"""Columns that only rows of one kind have."""

NUMBER = re.compile(r"\s*[-+]?\d[\d,]*(\.\d+)?\s*")


def function_for_dataset(path: str) -> str | None:
    """The function that scores the rows of this dataset; None: its name says nothing, its rows decide.

    Example:
        >>> function_for_dataset("openai/gsm8k"), function_for_dataset("python:my.rows")
        ('gsm8k', None)
    """
    if path.startswith("python:"):
        return None
    return next((function for pattern, function in BY_DATASET if re.search(pattern, path, re.IGNORECASE)), None)


def function_for_row(row: Mapping[str, Any]) -> str:
    """The function that a row's columns ask for.

    Example:
        >>> function_for_row({"nums": [1, 2], "target": 3}), function_for_row({"answer": "so 2 #### 2"})
        ('countdown', 'gsm8k')
    """
    for columns, function in BY_COLUMNS:
        if columns <= row.keys():
            return function
    answer = str(row.get("answer", ""))
    if "####" in answer:
        return "gsm8k"
    if NUMBER.fullmatch(answer):
        return "last_number"
    return "math" if re.search(r"[\\$^/=]", answer) else "exact"
