"""Call a reward function with what its parameters ask for.

    fn(prompt, completion, prompt_ids, completion_ids, **data)      AReaL's form, by position
    fn(completion, answer)                                          any part of it, by name

By name: `prompt`; `completion`, `completions` or `response`; `prompt_ids`; `completion_ids`; and the columns of the
dataset row. `**data` takes the columns that no parameter names.
"""

import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETION_NAMES = ("completion", "completions", "response")
TOKEN_COLUMNS = ("prompt_ids", "completion_ids")


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is to score. Token ids are int32, little-endian, and decoded only for functions that ask for them."""

    completion: str
    prompt: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: bytes | Sequence[int] = b""
    completion_ids: bytes | Sequence[int] = b""


Caller = Callable[[Sample], Any]


def bind(call: Callable[..., Any], constants: Mapping[str, Any] | None = None) -> Caller:
    """A function of a sample that calls `call` the way it is written.

    Args:
        call: The reward function.
        constants: Keyword arguments of every call, from the experiment file; they win over columns of the row.
    """
    extra = dict(constants or {})
    parameters = list(inspect.signature(call).parameters.values())
    if _is_areal_form(parameters):
        names, rest = _names_of(parameters[4:])
        return lambda sample: call(*_four(sample), **_columns(sample.data, extra, names, rest))
    names, rest = _names_of(parameters)
    return lambda sample: call(**_by_name(sample, extra, names, rest))


def _is_areal_form(parameters: Sequence[inspect.Parameter]) -> bool:
    """Four leading positional parameters, the third and fourth named for token ids."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    leading = [parameter.name for parameter in parameters[:4] if parameter.kind in positional]
    return len(leading) == 4 and tuple(leading[2:]) == TOKEN_COLUMNS


def _names_of(parameters: Sequence[inspect.Parameter]) -> tuple[frozenset[str], bool]:
    """Names that may be passed by keyword, and whether any other name may be too."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return frozenset(p.name for p in parameters if p.kind in by_keyword), rest


def _four(sample: Sample) -> tuple[str, str, list[int], list[int]]:
    return sample.prompt, sample.completion, token_ids(sample.prompt_ids), token_ids(sample.completion_ids)


def _columns(data: Mapping[str, Any], extra: dict[str, Any], names: frozenset[str], rest: bool) -> dict[str, Any]:
    reserved = ("prompt", *COMPLETION_NAMES, *TOKEN_COLUMNS)
    columns = {key: value for key, value in data.items() if (rest and key not in reserved) or key in names}
    return columns | extra


def _by_name(sample: Sample, extra: dict[str, Any], names: frozenset[str], rest: bool) -> dict[str, Any]:
    arguments = _columns(sample.data, extra, names, rest)
    if "prompt" in names or rest:
        arguments["prompt"] = sample.prompt
    for name in COMPLETION_NAMES:
        if name in names:
            arguments[name] = sample.completion
    if rest and not names.intersection(COMPLETION_NAMES):
        arguments["completion"] = sample.completion
    for name in TOKEN_COLUMNS:
        if name in names:
            arguments[name] = token_ids(getattr(sample, name))
    return arguments


def token_ids(packed: bytes | Sequence[int]) -> list[int]:
    """Token ids as a list."""
    if not isinstance(packed, bytes):
        return list(packed)
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()
