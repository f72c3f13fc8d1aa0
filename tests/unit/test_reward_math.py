"""`math` accepts no answer that does not mean the same as the reference; the right ones that it refuses are listed.

The graded pairs are in tests/testdata/math_answers.txt.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.reward.mathematics import math, same_answer

TABLE = Path(__file__).parents[1] / "testdata" / "math_answers.txt"
FORMS = (
    "First 7, then 12. So the answer is \\boxed{{{}}}.",
    "I get \\boxed{{999}}, no, wait.\n\nTherefore $x$ is $\\boxed{{{}}}$",
    "steps 1, 2, 3\n#### {}",
    "Adding 3 and 4 we see it.\n\n**The answer is: ${}$**",
)


def graded() -> Iterator[tuple[str, str, str]]:
    """(reference, grade, answer) of every line of the table."""
    reference = ""
    for line in TABLE.read_text().splitlines():
        if line[:2] in ("= ", "~ ", "! "):
            yield reference, line[0], line[2:]
        elif not line.startswith("#"):
            reference = line


def accepts(reference: str, answer: str) -> bool:
    return math(FORMS[0].format(answer), answer=reference)


def test_the_table_is_large_and_balanced() -> None:
    grades = [grade for _, grade, _ in graded()]
    assert grades.count("!") >= 300
    assert grades.count("=") >= 150


def test_no_wrong_answer_is_accepted() -> None:
    assert [pair for pair in graded() if pair[1] == "!" and accepts(pair[0], pair[2])] == []


def test_right_answers_are_accepted_but_for_the_listed_ones() -> None:
    assert [pair for pair in graded() if pair[1] == "=" and not accepts(pair[0], pair[2])] == []


def test_listed_false_rejects_are_still_refused() -> None:
    assert [pair for pair in graded() if pair[1] == "~" and accepts(pair[0], pair[2])] == []


@pytest.mark.parametrize("form", FORMS)
def test_the_last_statement_is_the_answer(form: str) -> None:
    assert math(form.format("\\frac{3}{4}"), answer="0.75")
    assert not math(form.format("0.7"), answer="0.75")


@pytest.mark.parametrize("reference", ["so it is #### 18", "Thus we get \\boxed{18} eggs.", "18", "$18$"])
def test_a_reference_may_be_a_whole_solution(reference: str) -> None:
    assert math("It is \\boxed{18}", answer=reference)
    assert not math("18 is not it, \\boxed{19} is", answer=reference)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "no idea",
        "\\boxed{}",
        "\\boxed{",
        "\\boxed{\\boxed{}}",
        "18 or so? The answer is unclear",
        "\\boxed{18, 19}",
    ],
)
def test_no_answer_is_no_right_answer(completion: str) -> None:
    assert not math(completion, answer="18")


NUMBERS = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=999)


@given(NUMBERS, NUMBERS)
def test_numbers_are_the_same_exactly_when_their_values_are(one: Fraction, other: Fraction) -> None:
    written = f"\\frac{{{2 * other.numerator}}}{{{2 * other.denominator}}}"
    assert same_answer(str(one), written) == (one == other)
    assert same_answer(str(other), written)


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_change_nothing(number: int) -> None:
    assert same_answer(str(number), f"{number:,}")
    assert not same_answer(str(number), f"{number + 1:,}")


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_gets_a_verdict(reference: str, answer: str) -> None:
    same_answer(reference, answer)
