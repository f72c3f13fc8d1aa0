"""Run one reward function on one sample; whatever it does, short of dying, is an outcome."""

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.errors import HeadwayError
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

    def __init__(self, name: str, constants: Mapping[str, Any] | None = None, in_loop: bool = False) -> None:
        """
        Args:
            name: A built-in function or an import path.
            constants: Keyword arguments of every call.
            in_loop: It will be run with `run_async`.

        Raises:
            InvalidInput: There is no such function.
        """
        self.function = find_function(name)
        self._call: Caller = bind(self.function.call, constants)
        self._runner = asyncio.Runner() if self.function.is_async and not in_loop else None

    def run(self, sample: Sample) -> Outcome:
        """Run the function to its end, here."""
        try:
            value = self._call(sample)
            return Outcome(ScoreStatus.OK, as_reward(self._runner.run(value) if self._runner is not None else value))
        except BaseException as error:  # noqa: BLE001 - the boundary of foreign code: SystemExit too is only a result
            return outcome_of(error)

    async def run_async(self, sample: Sample) -> Outcome:
        """Run an asynchronous function in the running loop."""
        try:
            return Outcome(ScoreStatus.OK, as_reward(await self._call(sample)))
        except Exception as error:  # noqa: BLE001 - the boundary of a reward function: whatever it raises is its result
            return outcome_of(error)


def outcome_of(error: BaseException) -> Outcome:
    """What it means for the item that its function raised this."""
    match error:
        case InvalidOutput():
            return Outcome(ScoreStatus.INVALID_OUTPUT, message=described_error(error, with_type=False))
        case Abstain():
            return Outcome(ScoreStatus.ABSTAIN, message=described_error(error, with_type=False))
        case MemoryError():
            return Outcome(ScoreStatus.KILLED_MEMORY, message=described_error(error))
        case HeadwayError():
            return Outcome(ScoreStatus.ERROR, message=described_error(error, with_type=False))
    return Outcome(ScoreStatus.ERROR, message=described_error(error))


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
