"""The history checker accepts what could have happened one by one, and nothing else."""

import pytest

from headway.testing.histories import LATER_THAN_ALL, Call, explain, register_model


def call(kind: str, argument: str | None, answer: str | None, begin: float, end: float = LATER_THAN_ALL) -> Call:
    return Call(kind, argument, answer, begin, end)


POSSIBLE = {
    "one after the other": [
        call("write", "a", "ok", 0, 1),
        call("read", None, "a", 2, 3),
        call("delete", None, "ok", 4, 5),
        call("read", None, "absent", 6, 7),
    ],
    "a read during a write sees either": [
        call("write", "a", "ok", 0, 10),
        call("read", None, "absent", 1, 2),
        call("read", None, "a", 3, 4),
    ],
    "an unanswered write takes effect late": [
        call("write", "a", None, 0),
        call("read", None, "absent", 5, 6),
        call("read", None, "a", 7, 8),
    ],
    "an unanswered write never takes effect": [call("write", "a", None, 0), call("read", None, "absent", 5, 6)],
    "one of two creates succeeds": [
        call("create", "a", "refused", 0, 5),
        call("create", "b", "ok", 0, 5),
        call("read", None, "b", 6, 7),
    ],
    "an unanswered create explains a refusal": [call("create", "a", None, 0), call("create", "b", "refused", 2, 3)],
}
IMPOSSIBLE = {
    "a write is lost": [call("write", "a", "ok", 0, 1), call("read", None, "absent", 2, 3)],
    "a read goes back": [
        call("write", "a", "ok", 0, 1),
        call("write", "b", "ok", 2, 9),
        call("read", None, "b", 3, 4),
        call("read", None, "a", 5, 6),
    ],
    "both creates succeed": [call("create", "a", "ok", 0, 5), call("create", "b", "ok", 0, 5)],
    "a refusal without a reason": [call("create", "a", "refused", 0, 1)],
    "one write takes effect twice": [
        call("write", "a", None, 0),
        call("read", None, "a", 1, 2),
        call("write", "b", "ok", 3, 4),
        call("read", None, "b", 5, 6),
        call("read", None, "a", 7, 8),
    ],
    "a value from nowhere": [call("read", None, "a", 0, 1)],
}


@pytest.mark.parametrize("case", POSSIBLE)
def test_what_could_have_happened_is_explained(case: str) -> None:
    order = explain(POSSIBLE[case], register_model)
    assert order is not None
    assert {c for c in POSSIBLE[case] if c.is_answered} <= set(order)


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_could_not_have_happened_is_not(case: str) -> None:
    assert explain(IMPOSSIBLE[case], register_model) is None
