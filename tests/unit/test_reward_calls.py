"""A reward function gets what its parameters ask for, and what it returns is a finite number or a typed failure."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from headway.errors import InvalidInput
from headway.reward import Abstain, Evaluator, Outcome, Sample, ScoreStatus, find_function
from headway.reward.binding import bind
from headway.reward.outcome import InvalidOutput, as_reward
from headway.reward.registry import described

SAMPLE = Sample(
    completion="c",
    prompt="p",
    data={"answer": "a", "level": 3, "prompt": "column"},
    prompt_ids=np.array([1, 2], "<i4").tobytes(),
    completion_ids=[3],
)


def areal(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **kwargs: Any
) -> Any:
    return prompt, completions, prompt_ids, completion_ids, answer, kwargs


def test_areals_form_is_called_by_position() -> None:
    assert bind(areal)(SAMPLE) == ("p", "c", [1, 2], [3], "a", {"level": 3})


def test_a_shorter_form_gets_what_it_names() -> None:
    assert bind(lambda completion, answer: (completion, answer))(SAMPLE) == ("c", "a")
    assert bind(lambda response: response)(SAMPLE) == "c"
    assert bind(lambda prompt, completion_ids: (prompt, completion_ids))(SAMPLE) == ("p", [3])
    assert bind(lambda completion, **data: sorted(data))(SAMPLE) == ["answer", "level", "prompt"]


def test_arguments_of_the_experiment_file_win_over_the_row() -> None:
    assert bind(lambda completion, level: level, {"level": 9})(SAMPLE) == 9


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'gold'"):
        bind(lambda completion, gold: 1)(SAMPLE)


@pytest.mark.parametrize(
    "value", [1, True, 0.5, np.float32(0.5), np.int64(2), np.array([0.25]), np.array(1), Fraction(1, 2)]
)
def test_numbers_are_rewards(value: Any) -> None:
    assert as_reward(value) == float(value.item() if isinstance(value, np.ndarray) else value)


class Liar:
    """Claims to be a number."""

    def __float__(self) -> float:
        return 1.0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value", [None, "1.0", float("nan"), float("inf"), [1.0], {}, np.array([1, 2]), 1j, Liar(), 10**400]
)
def test_everything_else_is_no_reward(value: Any) -> None:
    with pytest.raises(InvalidOutput):
        as_reward(value)


def raises(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Abstain("no view"), ScoreStatus.ABSTAIN, "no view"),
        (MemoryError(), ScoreStatus.KILLED_MEMORY, "MemoryError"),
        (KeyError("gold"), ScoreStatus.ERROR, "KeyError: 'gold'"),
        (SystemExit(0), ScoreStatus.ERROR, "SystemExit: 0"),
        (InvalidInput("no tests"), ScoreStatus.ERROR, "no tests"),
    ],
)
def test_what_a_function_raises_is_a_typed_outcome(error: BaseException, status: ScoreStatus, message: str) -> None:
    evaluator = Evaluator("headway.reward.text.exact")
    evaluator._call = lambda sample: raises(error)
    outcome = evaluator.run(Sample(""))
    assert outcome.status is status
    assert outcome.message.startswith(message)


def test_what_a_function_returns_is_the_reward() -> None:
    assert Evaluator("exact").run(Sample("a", data={"answer": "a"})) == Outcome(ScoreStatus.OK, 1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactly", "no reward function 'exactly': use one of .*exact, format"),
        ("no.such.module", "cannot load the reward function 'no.such.module': No module named 'no'"),
        ("math.no_such", "has no attribute 'no_such'"),
        ("math.pi", "is a float, not a callable"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        find_function(name)


def test_a_function_is_described_by_its_first_sentence() -> None:
    def fair(completion: str) -> float:
        """Judges fairly. Takes its time.

        And more.
        """
        return 1.0

    assert described(fair).summary == "Judges fairly"
    assert described(fair, "x.fair").name == "x.fair"
