"""Which functions an item is scored with, and with what weights: as the request, the experiment file or the row says.

A request may only name built-in functions and those that the experiment file names: it is no way to run any code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

import services.reward.functions  # noqa: F401 - registers what only the service has
from headway.config import ExperimentConfig
from headway.errors import InvalidInput
from headway.reward.choose import function_for_dataset, function_for_row
from headway.reward.judge import JudgeSettings, judge_settings
from headway.reward.registry import BUILT_IN
from headway.v1 import reward_pb2 as pb


@dataclass(frozen=True)
class Plan:
    """The choice of functions, fixed at the start of the service."""

    weights: Mapping[str, float]
    """The functions of an item that names none, with their weights; empty: its row decides."""
    extra: frozenset[str] = frozenset()
    """Import paths that the experiment file names elsewhere."""
    constants: Mapping[str, Mapping[str, Any]] | None = None
    """Keyword arguments of each function."""

    judge: JudgeSettings | None = None
    """How the judge is asked; None: there is none."""

    @cached_property
    def functions(self) -> list[str]:
        """Every function that may be asked for."""
        known = {*BUILT_IN, *self.weights, *self.extra}
        return sorted(known if self.judge is not None else known - {"judge"})

    def for_item(self, item: pb.ScoreItem) -> Mapping[str, float]:
        """The functions of this item, with their weights.

        Raises:
            InvalidInput: It names a function that may not be asked for, or its row is no JSON object.
        """
        if item.function:
            if item.function not in self.functions:
                raise InvalidInput(
                    f"item {item.item_id}: no reward function {item.function!r}; use a built-in one, "
                    "or name its import path in reward.function of the experiment file (judge: its reward.kwargs too)"
                )
            return {item.function: 1.0}
        return self.weights or {function_for_row(_row(item)): 1.0}


def _row(item: pb.ScoreItem) -> dict[str, Any]:
    try:
        row = orjson.loads(item.data_json or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"item {item.item_id}: data_json is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidInput(f"item {item.item_id}: data_json is a {type(row).__name__}, not an object")
    return row


def plan_of(config: ExperimentConfig) -> Plan:
    """The plan that an experiment file describes.

    Raises:
        InvalidInput: `reward.kwargs` does not fit `reward.function`.
    """
    named = config.reward.function
    if named is None:
        chosen = function_for_dataset(config.train_dataset.path)
        weights = {chosen: 1.0} if chosen else {}
    else:
        weights = {named: 1.0} if isinstance(named, str) else dict(named)
    if isinstance(named, dict) and not named:
        raise InvalidInput("reward.function: an empty mapping; name at least one function")
    own = config.workflow.kwargs.get("reward_fn")
    extra = frozenset([own]) if isinstance(own, str) else frozenset()
    constants = _constants(weights, config.reward.kwargs)
    judge = judge_settings(constants.pop("judge", {})) if "judge" in weights else None
    return Plan(weights, extra, constants, judge)


def _constants(weights: Mapping[str, float], kwargs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """One function: its keyword arguments; several: a mapping of these to keyword arguments."""
    if not kwargs:
        return {}
    if len(weights) == 1:
        name = next(iter(weights))
        return {name: kwargs.get(name, kwargs) if set(kwargs) == {name} else kwargs}
    unknown = sorted(set(kwargs) - set(weights))
    if unknown or not weights:
        names = ", ".join(sorted(weights)) or "a function"
        raise InvalidInput(f"reward.kwargs: {', '.join(unknown)}: with several functions its keys are {names}")
    return {name: dict(values) for name, values in kwargs.items()}
