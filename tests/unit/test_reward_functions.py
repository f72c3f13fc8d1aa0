"""What each built-in reward function accepts, and what it does not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InvalidInput
from headway.reward.choice import multiple_choice
from headway.reward.choose import function_for_dataset, function_for_row
from headway.reward.countdown import countdown
from headway.reward.procedural import reasoning_gym
from headway.reward.program import Assertions, Calls, Programs, program_in, same_output, same_value, suite_in
from headway.reward.shape import format, length
from headway.reward.text import exact, gsm8k, last_number


@pytest.mark.parametrize(
    ("completion", "answer", "is_right"),
    [
        ("12", "12", True),
        ("I think 3, no, 12.", "12", True),
        ("12 or 13", "12", False),
        ("-4", "-4", True),
        ("4", "-4", False),
        ("it is 1,234", "1234", True),
        ("", "0", False),
        ("none", "0", False),
        ("007", "7", True),
        ("3\n4\n", 4, True),
    ],
)
def test_last_number_is_the_last_integer(completion: str, answer: Any, is_right: bool) -> None:
    assert last_number(completion, answer=answer) is is_right


@given(st.integers(), st.text())
def test_last_number_finds_what_was_written_last(number: int, before: str) -> None:
    assert last_number(f"{before} {number}", answer=str(number))


def test_exact_overlooks_white_space_around_only() -> None:
    assert exact(" a b\n", answer="a b")
    assert not exact("a  b", answer="a b")
    assert not exact("A b", answer="a b")


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("so #### 1,250", True),
        ("#### 1250.00", True),
        ("#### $1250", True),
        ("\\boxed{1250}", True),
        ("She pays 1250 dollars.", True),
        ("#### 12500", False),
        ("1250 #### 13", False),
        ("1250, or rather 1251", False),
        ("####", False),
        ("", False),
    ],
)
def test_gsm8k_compares_the_stated_number(completion: str, is_right: bool) -> None:
    assert gsm8k(completion, answer="She pays 1,250.\n#### 1,250") is is_right


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("The answer is (C).", True),
        ("A is tempting. Answer: C", True),
        ("\\boxed{C}", True),
        ("\\boxed{\\text{C}}", True),
        ("<answer>c</answer>", True),
        ("Because it is hot.\n\n**C**", True),
        ("C) Paris", True),
        ("It must be\nParis.", True),
        ("The answer is B, no: the answer is C", True),
        ("The answer is C, no: the answer is B", False),
        ("A city on the Seine", False),
        ("C is a letter of the alphabet", False),
        ("The answer is clear", False),
        ("ABCD", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("answer", ["C", 2, "Paris"])
def test_multiple_choice_takes_the_choice_stated_last(completion: str, is_right: bool, answer: Any) -> None:
    assert multiple_choice(completion, choices=["Rome", "Oslo", "Paris", "Bonn"], answer=answer) is is_right


def test_multiple_choice_reads_labelled_choices() -> None:
    row = {"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    assert multiple_choice("B", **row)
    assert not multiple_choice("A", **row)
    with pytest.raises(InvalidInput, match="the right choice 'Z9' is no letter"):
        multiple_choice("B", choices=["x"], answer="Z9")


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("<answer>94*4 - 61 - 6</answer>", True),
        ("<answer>94*4-61-6 = 309</answer>", True),
        ("I try: \\boxed{94 \\times 4 - (61 + 6)}", True),
        ("94*4 - 61 - 6", True),
        ("<answer>309</answer>", False),
        ("<answer>94*4 - 67</answer>", False),
        ("<answer>94*4 - 61 - 6 + 0</answer>", False),
        ("<answer>94*4 - 61 - 6 - 6 + 6</answer>", False),
        ("<answer>9**9**9**9</answer>", False),
        ("<answer>__import__('os').abort()</answer>", False),
        ("<answer>1/0</answer>", False),
        ("<answer>" + "(" * 300 + "</answer>", False),
        ("", False),
    ],
)
def test_countdown_uses_each_number_once_and_reaches_the_target(completion: str, is_right: bool) -> None:
    assert countdown(completion, nums=[6, 61, 94, 4], target=309) is is_right


def test_reasoning_gym_asks_the_task_itself() -> None:
    row = {"answer": "-4", "question": "4 - 1 - 7 =", "metadata": {"source_dataset": "chain_sum"}}
    assert reasoning_gym("<answer>-4</answer>", **row) == 1.0
    assert reasoning_gym("It is \\boxed{-4}.", **row) == 1.0
    assert reasoning_gym("<answer>5</answer>", **row) < 1.0
    with pytest.raises(InvalidInput, match="not registered"):
        reasoning_gym("1", metadata={"source_dataset": "absent"})
    with pytest.raises(InvalidInput, match="has no metadata"):
        reasoning_gym("1", answer="1")


def test_format_finds_its_pattern() -> None:
    pattern = r"^<think>.*</think>\s*<answer>.*</answer>$"
    assert format("<think>a\nb</think>\n<answer>1</answer>", pattern=pattern)
    assert not format("<answer>1</answer>", pattern=pattern)
    with pytest.raises(ValueError, match="needs a `pattern`"):
        format("x")


@pytest.mark.parametrize(
    ("tokens", "bounds", "reward"),
    [
        (5, {"max_tokens": 5}, 1.0),
        (6, {"max_tokens": 5}, 0.0),
        (6, {"max_tokens": 5, "slope": 4}, 0.75),
        (9, {"max_tokens": 5, "slope": 4}, 0.0),
        (3, {"min_tokens": 5, "slope": 4}, 0.5),
        (3, {"max_chars": 5}, 0.0),
        (3, {"max_chars": 6}, 1.0),
    ],
)
def test_length_falls_beyond_its_bounds(tokens: int, bounds: dict[str, int], reward: float) -> None:
    assert length("ab" * tokens, list(range(tokens)), **bounds) == reward


def test_the_function_follows_from_the_dataset() -> None:
    paths = [
        "openai/gsm8k",
        "HuggingFaceH4/MATH-500",
        "reasoning_gym:countdown",
        "openai/openai_humaneval",
        "cais/mmlu",
    ]
    assert [function_for_dataset(path) for path in paths] == [
        "gsm8k",
        "math",
        "reasoning_gym",
        "code",
        "multiple_choice",
    ]
    assert function_for_dataset("python:math_rows.make") is None


@pytest.mark.parametrize(
    ("row", "function"),
    [
        ({"answer": "17"}, "last_number"),
        ({"answer": "\\frac{1}{2}"}, "math"),
        ({"answer": "so it is\n#### 4"}, "gsm8k"),
        ({"answer": "yes"}, "exact"),
        ({"choices": ["a", "b"], "answer": 0}, "multiple_choice"),
        ({"nums": [1, 2], "target": 3}, "countdown"),
        ({"test_list": ["assert True"]}, "code"),
        ({"metadata": {}, "source_dataset": "chain_sum", "answer": "4"}, "reasoning_gym"),
    ],
)
def test_the_function_follows_from_the_row(row: dict[str, Any], function: str) -> None:
    assert function_for_row(row) == function


def test_tests_are_read_in_every_known_form() -> None:
    assert suite_in({"test_list": ["assert f(1)"], "test_setup_code": "x = 1"}) == Assertions(["assert f(1)"], "x = 1")
    assert suite_in({"test": "def check(f): pass", "entry_point": "f"}) == Assertions(["def check(f): pass\ncheck(f)"])
    assert suite_in({"inputs": ["1\n"], "outputs": ["2"]}) == Programs([("1\n", "2")])
    assert suite_in({"tests": [{"input": "1", "output": "2"}]}) == Programs([("1", "2")])
    functional = {"inputs": [[[1], 2]], "outputs": [[3]], "fn_name": "f"}
    assert suite_in({"input_output": functional}) == Calls("f", [([[1], 2], [3])])
    assert suite_in({"tests": [{"input": "[1]\n2", "output": "3"}], "fn_name": "f"}) == Calls("f", [([[1], 2], 3)])


@pytest.mark.parametrize("row", [{}, {"tests": []}, {"tests": "no JSON"}, {"inputs": [1], "outputs": []}, {"tests": 5}])
def test_a_row_without_usable_tests_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        suite_in(row)


def test_the_program_is_the_last_fenced_block() -> None:
    assert program_in("```python\na\n```\nor\n```py\nb\n```") == "b\n"
    assert program_in("```python\na\n```\noutput:\n```text\nb\n```") == "a\n"
    assert program_in("print(1)") == "print(1)"
    assert program_in("```python\nunfinished") == "unfinished"


def test_values_and_outputs_agree_by_meaning() -> None:
    assert same_value({1: (1, 2)}, {"1": [1, 2]})
    assert not same_value(1, True)
    assert not same_value([1], [1, 2])
    assert same_output("1.50\n\n", "1.5")
    assert not same_output("1 2", "12")
    assert not same_output("nan", "1")
