"""From the columns of a data file to rows that workflows and reward functions read.

A row is a JSON-able dict with `messages` (a chat) or `prompt` (a text), usually `answer`, and whatever else the reward
function needs. Columns that already have this form stay as they are. Otherwise the first of `QUESTIONS` becomes the
user's message and the first of `ANSWERS` the answer. GSM8K is known by the `####` in its answers, and asks for a boxed
answer as AReaL's examples do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import InvalidInput

Row = dict[str, Any]

QUESTIONS = ("question", "problem", "instruction", "query")
ANSWERS = ("answer", "solution", "output", "target", "label", "ground_truth", "response")
GSM8K_MARK = "####"
GSM8K_SUFFIX = "\nPlease put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Adapter:
    """How raw rows of one source become rows."""

    question: str | None
    """Column that becomes the user's message; None: the rows have `messages` or `prompt`."""
    answer: str | None
    """Column that becomes `answer`; None: it stays as it is."""
    suffix: str = ""
    """Added to every question."""

    def adapt(self, raw: Mapping[str, Any]) -> Row:
        """One row. Columns that were not asked for are kept."""
        row = dict(raw)
        if self.question is not None:
            row["messages"] = [{"role": "user", "content": str(row.pop(self.question)) + self.suffix}]
        elif not isinstance(row.get("prompt"), str) and isinstance(row.get("prompt"), Sequence):
            row["messages"] = row.pop("prompt")
        if self.answer is not None:
            row["answer"] = row.pop(self.answer)
        return row


def adapter_of(raw: Sequence[Mapping[str, Any]], source: str) -> Adapter:
    """The adapter for a source, judged by its first rows.

    Raises:
        InvalidInput: Nothing in the rows can be a prompt.
    """
    first = raw[0]
    has_prompt = "messages" in first or "prompt" in first
    question = None if has_prompt else next((column for column in QUESTIONS if column in first), None)
    if question is None and not has_prompt:
        columns = ", ".join(sorted(first))
        raise InvalidInput(
            f"{source}: no column can be a prompt: rows have {columns}; a row needs `messages` (a chat), `prompt` "
            f"(a text) or one of {', '.join(QUESTIONS)}. A function `python:module.function` can make them"
        )
    answer = None if "answer" in first else next((column for column in ANSWERS if column in first), None)
    if all(GSM8K_MARK in str(row.get("answer", "")) for row in raw[:16]):
        return Adapter(question, answer, GSM8K_SUFFIX)
    return Adapter(question, answer)
