"""Compare mathematical answers by meaning: exact arithmetic where both are numbers, math-verify for expressions.

math-verify is sympy behind a grammar of LaTeX. It may take for ever on some inputs and has no useful limit of its own,
so it belongs in a process that can be killed. It is also generous: it takes any part of a text for the answer, a set
for a tuple, one unit for another. So it only sees single expressions, in one spelling; the rest is decided here:

    names and units      differ: not the same; a name or a unit that only one of them has is overlooked
    sets, lists, \\pm     the same elements, in any order
    tuples, intervals    the same brackets, and the same elements in the same order
    unions               the same parts, in any order
    words                letter by letter

Proved against a table of graded pairs in tests/unit/test_reward_math.py: no false accept.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from headway.reward.answers import final_answer
from headway.reward.kinds import Kind, kind_of, parts_of
from headway.reward.reference import reference_answer
from headway.reward.registry import reward_function
from headway.reward.spelling import Quantity, cut, exact_number, normal_spelling

MAX_ANSWER_CHARS = 1000
MAX_PARTS = 64
EXACT_DIGITS = 12


@reward_function(is_pure=True, typical_s=0.001, imports=("headway.reward.warm_mathematics",))
def math(completion: str, **data: Any) -> bool:
    """The final answer (boxed, after `####`, after "answer is", or last) means the same as the reference."""
    reference = reference_answer(data)
    if "boxed" in reference or "####" in reference:
        reference = final_answer(reference) or reference
    answer = final_answer(completion)
    return answer is not None and same_answer(reference, answer)


def same_answer(reference: str, answer: str) -> bool:
    """Whether two answers mean the same.

    Example:
        >>> same_answer("1,000", "10^3"), same_answer("(1,2)", "(2,1)"), same_answer("5\\\\text{ cm}", "5 m")
        (True, False, False)
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    return _same(normal_spelling(reference), normal_spelling(answer))


def _same(ours: str, theirs: str) -> bool:
    """The comparison of two answers in normal spelling."""
    if _without_spaces(ours) == _without_spaces(theirs):
        return bool(ours)
    left, right = cut(ours), cut(theirs)
    if _differ(left.name, right.name) or _differ(left.unit, right.unit):
        return False
    numbers = exact_number(left.value), exact_number(right.value)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[1] in _readings(numbers[0], left.unit, right.unit)
    values = _value_of(left), _value_of(right)
    kind = kind_of(values[0])
    return kind is kind_of(values[1]) and _same_of_kind(kind, *values)


def _without_spaces(text: str) -> str:
    """Spaces behind commas stay: 9,999 is one number, and 9, 999 are two."""
    return re.sub(r"(?<!,)\s", "", text)


def _differ(ours: str, theirs: str) -> bool:
    return bool(ours and theirs) and ours != theirs


def _value_of(quantity: Quantity) -> str:
    return f"\\frac{{{quantity.value}}}{{100}}" if quantity.unit == "%" else quantity.value


def _readings(number: Fraction, unit: str, their_unit: str) -> set[Fraction]:
    """What the other number may be, when one of the two is a percentage.

    A reference of 50% is also met by 0.5, and by 50, where the sign was overlooked. A plain 1/2 is 50%, and never 0.5%.
    """
    if (unit == "%") == (their_unit == "%"):
        return {number}
    return {number, number / 100} if unit == "%" else {100 * number}


def _same_of_kind(kind: Kind, ours: str, theirs: str) -> bool:
    match kind:
        case Kind.TEXT:
            return ours.strip("()").casefold() == theirs.strip("()").casefold()
        case Kind.EXPRESSION | Kind.RELATION:
            return _same_meaning(ours, theirs)
    left, right = parts_of(kind, ours), parts_of(kind, theirs)
    if left.brackets != right.brackets or max(len(left.parts), len(right.parts)) > MAX_PARTS:
        return False
    if kind is Kind.SEQUENCE:
        return len(left.parts) == len(right.parts) and all(map(_same, left.parts, right.parts))
    covers = all(any(_same(part, other) for other in right.parts) for part in left.parts)
    return covers and all(any(_same(part, other) for part in left.parts) for other in right.parts)


def _same_meaning(ours: str, theirs: str) -> bool:
    """math-verify's judgement of two expressions, equations or inequalities."""
    import math_verify

    gold, answer = _parsed(ours), _parsed(theirs)
    if not gold or not answer:
        return False
    return bool(math_verify.verify(gold, answer, float_rounding=EXACT_DIGITS, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    """The expression, without the text that math-verify adds for a comparison by letters; empty: it is none."""
    import math_verify

    found = math_verify.parse(f"${text}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)
    return [part for part in found if not isinstance(part, str)]
