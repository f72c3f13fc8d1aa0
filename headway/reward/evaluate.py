"""Run one reward function on one sample; whatever it does, short of dying, is an outcome."""

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.reward.binding import Caller, Sample, bind
from headway.reward.outcome import Abstain, InvalidOutput, Outcome, ScoreStatus, as_reward
from headway.reward.registry import find_function

MAX_MESSAGE_CHARS = 500


class Evaluator:
    """One function, ready to be called many times.

    Example:
        >>> Evaluator("exact").run(Sample(completion=" 42", data={"answer": "42"}))
        Outcome(status=<ScoreStatus.OK: 'ok'>, reward=1.0, message='', parts={})
    """

    def __init__(self, name: str, constants: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            InvalidInput: There is no such function.
        """
        self.function = find_function(name)
        self._call: Caller = bind(self.function.call, constants)
        self._runner = asyncio.Runner() if self.function.is_async else None

    def run(self, sample: Sample) -> Outcome:
        try:
            value = self._call(sample)
            reward = as_reward(self._runner.run(value) if self._runner is not None else value)
        except InvalidOutput as error:
            return Outcome(ScoreStatus.INVALID_OUTPUT, message=described_error(error, with_type=False))
        except Abstain as error:
            return Outcome(ScoreStatus.ABSTAIN, message=described_error(error, with_type=False))
        except MemoryError as error:
            return Outcome(ScoreStatus.KILLED_MEMORY, message=described_error(error))
        except BaseException as error:  # noqa: BLE001 - the boundary of foreign code: SystemExit too is only a result
            return Outcome(ScoreStatus.ERROR, message=described_error(error))
        return Outcome(ScoreStatus.OK, reward)


def described_error(error: BaseException, with_type: bool = True) -> str:
    """The error in one bounded line, with the line of code that raised it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a foreign error may fail to describe itself
        text = "(no description)"
    if with_type:
        text = f"{type(error).__name__}: {text}{_place(error)}"
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_name}, line {trace.tb_lineno})" if trace is not None else ""
