"""Multiple choice: which letter the completion has chosen, and whether it is the right one.

A letter counts where it is stated as the choice: in a box, after "answer is" or "Answer:", alone in the last line, or
in front of its own text there. A letter inside a sentence ("A train ...") never does. The last statement counts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import InvalidInput
from headway.reward.reference import reference_answer
from headway.reward.registry import reward_function

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BOXED = re.compile(r"\\boxed\{\s*(?:\\text\w*\{)?\s*\(?([A-Za-z])\)?\s*\}?\s*\}")
STATED = re.compile(
    r"(?:answer|choice|option)(?:\s+(?:is|would be|should be)|\s*[:=])\s*[*_\s$]*(?:option\s+)?[(\[]?([A-Z])(?![\w'])",
    re.IGNORECASE,
)
TAGGED = re.compile(r"<answer>\s*[(\[]?([A-Za-z])[)\].:]?\s*</answer>")
ALONE = re.compile(r"[*_\s(\[]*([A-Z])[*_\s)\].:]*")
IN_FRONT = re.compile(r"[*_\s(\[]*([A-Z])[)\].:][*_\s]+(.+)")


@reward_function(is_pure=True, typical_s=5e-5)
def multiple_choice(completion: str, **data: Any) -> bool:
    """The letter stated last as the choice is the right one; or the last line is the right choice's text."""
    texts = _texts(data)
    right = right_letter(data, texts)
    chosen = chosen_letter(completion)
    if chosen is None and texts:
        last = _last_line(completion).strip(" .*_").casefold()
        matching = [LETTERS[index] for index, text in enumerate(texts) if text.strip(" .").casefold() == last]
        chosen = matching[0] if len(matching) == 1 else None
    return chosen == right


def chosen_letter(completion: str) -> str | None:
    """The letter that is stated last; None: none is stated.

    Example:
        >>> chosen_letter("A is wrong. The answer is (C)."), chosen_letter("A train leaves.")
        ('C', None)
    """
    stated = [match for pattern in (BOXED, STATED, TAGGED) for match in pattern.finditer(completion)]
    stated = [match for match in stated if match[1].isupper() or match.re is not STATED]
    if stated:
        return max(stated, key=lambda match: match.start())[1].upper()
    last = _last_line(completion)
    alone = ALONE.fullmatch(last) or IN_FRONT.fullmatch(last)
    return alone[1] if alone else None


def _last_line(completion: str) -> str:
    lines = completion.strip().splitlines()
    return lines[-1] if lines else ""


def right_letter(data: Mapping[str, Any], texts: Sequence[str]) -> str:
    """The right choice's letter: the reference is a letter, an index from 0, or the choice's text.

    Raises:
        InvalidInput: It is none of these.
    """
    reference = data.get("answerKey", data.get("answer_letter"))
    reference = str(reference if reference is not None else reference_answer(data)).strip()
    labels = _labels(data)
    if reference in labels:
        return LETTERS[labels.index(reference)]
    if len(reference) == 1 and reference.upper() in LETTERS:
        return reference.upper()
    if reference.isdecimal() and int(reference) < max(len(texts), 1):
        return LETTERS[int(reference)]
    if reference in texts:
        return LETTERS[texts.index(reference)]
    raise InvalidInput(f"the right choice {reference[:60]!r} is no letter, no index and none of the choices")


def _choices(data: Mapping[str, Any]) -> Any:
    return data.get("choices", data.get("options", ()))


def _texts(data: Mapping[str, Any]) -> list[str]:
    choices = _choices(data)
    if isinstance(choices, Mapping):
        choices = choices["text"] if "text" in choices else choices.values()
    return [str(choice) for choice in choices]


def _labels(data: Mapping[str, Any]) -> list[str]:
    choices = _choices(data)
    if not isinstance(choices, Mapping):
        return []
    return [str(label) for label in choices.get("label", choices)]
