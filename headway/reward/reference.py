"""Find the reference answer in a dataset row."""

from collections.abc import Mapping
from typing import Any

from headway.errors import InvalidInput

COLUMNS = ("answer", "ground_truth", "solution", "target", "label", "expected")
"""Where datasets keep the reference answer, in the order in which they are looked at."""


def reference_answer(data: Mapping[str, Any]) -> str:
    """The row's reference answer as text.

    Raises:
        InvalidInput: The row has none of the usual columns.
    """
    for column in COLUMNS:
        if data.get(column) is not None:
            return str(data[column])
    raise InvalidInput(f"the row has no reference answer: none of {', '.join(COLUMNS)} among {', '.join(sorted(data))}")
