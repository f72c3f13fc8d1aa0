"""Was there one order in which all these concurrent calls could have happened? (linearizability; arXiv:1504.00204)

    calls with begin and end  ->  choose one that could be first  ->  does its answer fit the state?  ->  the rest
                                         ^ and back, when nothing fits

A call whose answer never came may have taken effect at any moment after its beginning, or never. A refusal is an
answer.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

LATER_THAN_ALL = float("inf")


@dataclass(frozen=True, slots=True)
class Call:
    """One call as its caller saw it."""

    kind: str
    argument: Any
    answer: Any
    """None and `end` infinite: it never came."""
    begin: float
    end: float

    @property
    def is_answered(self) -> bool:
        return self.end != LATER_THAN_ALL


Model = Callable[[Hashable, Call], "tuple[bool, Hashable]"]
"""(state, call) -> whether the call's answer fits the state, and the state afterwards. Unanswered, it fits any."""


def explain(calls: Sequence[Call], model: Model, initial: Hashable = None) -> list[Call] | None:
    """An order in which the calls could have happened one by one, each between its begin and its end.

    Returns:
        The order, unanswered calls that never took effect left out; None: there is none, and something is wrong.
    """
    order: list[Call] = []
    calls = sorted(calls, key=lambda call: call.begin)
    all_answered = sum(1 << index for index, call in enumerate(calls) if call.is_answered)
    return order if _search(calls, model, all_answered, 0, initial, set(), order) else None


def _search(
    calls: Sequence[Call],
    model: Model,
    wanted: int,
    done: int,
    state: Hashable,
    failed: set[tuple[int, Hashable]],
    order: list[Call],
) -> bool:
    """Depth first; `done` and `wanted` are sets of indices as bits, `failed` what is known to lead nowhere."""
    if done & wanted == wanted:
        return True
    if (done, state) in failed:
        return False
    first_end = min(call.end for index, call in enumerate(calls) if not done >> index & 1)
    for index, call in enumerate(calls):
        if done >> index & 1 or call.begin > first_end:
            continue
        fits, after = model(state, call)
        if fits:
            order.append(call)
            if _search(calls, model, wanted, done | 1 << index, after, failed, order):
                return True
            order.pop()
    failed.add((done, state))
    return False


def register_model(state: Hashable, call: Call) -> tuple[bool, Hashable]:
    """A name that can be written, created where absent, deleted and read; its state is its value, None when absent.

    Answers: "ok" or "refused" of a write, create or delete; the value, or "absent", of a read.
    """
    if call.kind == "read":
        return call.answer == ("absent" if state is None else state), state
    could = {"write": True, "create": state is None, "delete": state is not None}[call.kind]
    after = (None if call.kind == "delete" else call.argument) if could else state
    is_as_answered = not call.is_answered or could == (call.answer == "ok")
    return is_as_answered, after
