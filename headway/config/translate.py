"""Say what pydantic found wrong in words that tell what was meant."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from headway.config.actor import OLD_MODES
from headway.config.experiment import FILLED, ExperimentConfig
from headway.config.keys import field_at, nearest, value_at
from headway.config.problems import Problem, shown
from headway.config.spelling import as_written

MEANT = {
    "int": "a whole number was meant",
    "float": "a number was meant",
    "bool": "true or false was meant",
    "string": "a text was meant",
    "list": "a list was meant",
    "dict": "a mapping of keys to values was meant",
    "model": "a section with keys was meant",
    "none": "only null is possible",
}
"""By the first word of pydantic's name for the error."""

HINTS = {
    (
        "scheduler.type",
        "ray",
    ): "Ray does not place processes here: use `local` on one machine, `kubernetes` with the chart",
    (
        "scheduler.type",
        "slurm",
    ): "Slurm does not place processes here: use `local` inside a one-node job, or `kubernetes`",
    (
        "train_dataset.type",
        "sft",
    ): "this file trains by reinforcement; for a supervised phase before it set `warm_start`",
    ("train_dataset.type", "rw"): "reward models are not trained here; rewards come from the reward service",
    ("ref.optimizer", None): "the reference is never trained: write null",
    ("actor.behave_imp_weight_mode", None): f"one of {', '.join(OLD_MODES)} was meant",
}
"""(key, value) -> what to do instead; None: whatever the value."""


def translate(error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """One problem for each key that is wrong.

    Args:
        error: What pydantic says.
        data: The resolved data, as it was validated.
    """
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue
        key = as_written(_key_of(item["loc"], data, is_unknown=item["type"] == "extra_forbidden"), data)
        problems.setdefault(key, Problem(key, _message(key, item)))
    filled_from = dict(FILLED)
    return [p for p in problems.values() if value_at(data, p.key)[0] or filled_from.get(p.key) not in problems]


def _key_of(loc: Sequence[int | str], data: Any, *, is_unknown: bool) -> str:
    """The dotted key of a location, without the names of union members that pydantic puts behind it."""
    parts: list[str] = []
    for part in loc:
        key = ".".join([*parts, str(part)])
        if is_unknown or field_at(ExperimentConfig, key) is not None or value_at(data, key)[0]:
            parts.append(str(part))
    return ".".join(parts)


def _message(key: str, item: Any) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    for hint in ((key, _hashable(value)), (key, None)):
        if hint in HINTS:
            return f"{shown(value)}: {HINTS[hint]}"
    if kind == "extra_forbidden":
        meant = nearest(ExperimentConfig, key)
        return f"unknown key; did you mean {meant}?" if meant else "unknown key"
    if kind == "literal_error":
        return _none_of(key, value)
    if kind in ("int_from_float", "int_parsing_size"):
        return f"a whole number was meant, not {shown(value)}"
    if bound := _bound(kind, context):
        return f"must be {bound}, is {shown(value)}"
    field = field_at(ExperimentConfig, key)
    if field is not None and {dict, str} <= {getattr(a, "__origin__", a) for a in get_args(field.annotation)}:
        return f"a name, or a mapping of names to weights, was meant, not {shown(value)}"
    if kind.split("_")[0] in MEANT and re.search(r"_(type|parsing|required)$", kind):
        return f"{MEANT[kind.split('_')[0]]}, not {shown(value)}"
    return str(item["msg"])


def _bound(kind: str, context: Mapping[str, Any]) -> str | None:
    words = {
        "greater_than": ("above", "gt"),
        "greater_than_equal": ("at least", "ge"),
        "less_than": ("below", "lt"),
        "less_than_equal": ("at most", "le"),
    }
    if kind == "finite_number":
        return "finite"
    return f"{words[kind][0]} {context[words[kind][1]]:g}" if kind in words else None


def _none_of(key: str, value: Any) -> str:
    field = field_at(ExperimentConfig, key)
    known = [str(choice) for choice in _choices(field.annotation if field else None)]
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.6)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{shown(value)} is none of {', '.join(known)}{meant}"


def _choices(annotation: Any) -> list[Any]:
    found: list[Any] = []
    for argument in get_args(annotation):
        if isinstance(argument, str):
            found.append(argument)
        elif argument is type(None):
            continue
        else:
            found += _choices(argument)
    return found


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else None


def without(data: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """A copy of the data in which every key with a problem has its default: for finding out what else is wrong."""
    copied: dict[str, Any] = _copy(data)
    for problem in problems:
        parent, _, name = problem.key.rpartition(".")
        found, holder = value_at(copied, parent) if parent else (True, copied)
        if found and isinstance(holder, dict):
            holder.pop(name, None)
        elif found and isinstance(holder, list) and name.isdigit() and int(name) < len(holder):
            holder.pop(int(name))
    return copied


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
