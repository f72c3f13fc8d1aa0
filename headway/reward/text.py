"""Functions that only compare text: linear in the length of the completion, whatever it holds."""

import re
from fractions import Fraction
from typing import Any

from headway.reward.reference import reference_answer
from headway.reward.registry import reward_function

INTEGER = re.compile(r"[-+−]?\d(?:[\d,]*\d)?")
NUMBER = re.compile(r"[-+−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d*(?:\.\d+)?")


@reward_function(is_pure=True, typical_s=1e-5)
def exact(completion: str, **data: Any) -> bool:
    """The completion equals the reference answer, apart from white space around it."""
    return completion.strip() == reference_answer(data).strip()


@reward_function(is_pure=True, typical_s=1e-5)
def last_number(completion: str, **data: Any) -> bool:
    """The last integer in the completion equals the reference answer."""
    found = INTEGER.findall(completion)
    return bool(found) and _number(found[-1]) == _number(reference_answer(data).strip())


@reward_function(is_pure=True, typical_s=1e-5)
def gsm8k(completion: str, **data: Any) -> bool:
    """The number after `####`, in a box, or else the last number equals the one after `####` in the reference."""
    reference = _number(reference_answer(data).rpartition("####")[2].strip())
    return reference is not None and _stated_number(completion) == reference


def _stated_number(completion: str) -> Fraction | None:
    marked = completion.rpartition("####")
    if marked[1]:
        found = NUMBER.search(marked[2])
        return _number(found[0]) if found else None
    boxed = completion.rpartition("\\boxed{")
    if boxed[1]:
        return _number(boxed[2].partition("}")[0])
    found_all = NUMBER.findall(completion)
    return _number(found_all[-1]) if found_all else None


def _number(text: str) -> Fraction | None:
    """A number with or without thousands separators and currency or percent signs; None: it is none."""
    plain = text.strip().replace("−", "-").strip("$%").rstrip(".").strip()
    if not plain or not THOUSANDS.fullmatch(plain) or len(plain) > 400:
        return None
    digits = plain.replace(",", "")
    return Fraction(digits) if any(c.isdigit() for c in digits) else None
