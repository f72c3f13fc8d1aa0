"""Decide what one request's sampling parameters mean, or refuse them in SGLang's words.

The keys, defaults, ranges and messages are those of SGLang 0.5.23. An explicit null means the default. What the
built-in engine does not do (grammars, beams, regular expressions as stops) is refused rather than ignored.

Pure: no tensor, no I/O.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

GREEDY_BELOW = 1e-6
"""A temperature below this means greedy decoding."""
MAX_STOP_STRINGS = 32


class BadRequest(Exception):
    """The request is refused with status 400."""


class BadSchema(Exception):
    """A key of `sampling_params` is unknown, or its value has the wrong JSON type: status 400."""


class BadBody(Exception):
    """A key of the request has the wrong JSON type: status 400."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample; the fields are the keys of SGLang's `sampling_params`."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    """0 was made greedy: temperature 1 and `top_k` 1, as SGLang does."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None


INTEGERS = ("max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed")
NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
BOOLEANS = ("ignore_eos", "skip_special_tokens", "no_stop_trim")
UNSUPPORTED = ("stop_regex", "beam_width", "json_schema", "regex", "ebnf", "structural_tag", "watermark", "choice")
IGNORED = ("spaces_between_special_tokens", "custom_params")
KNOWN = (*INTEGERS, *NUMBERS, *BOOLEANS, "stop", "stop_token_ids", "logit_bias", *UNSUPPORTED, *IGNORED)
DEFAULT = SamplingParams()


def read_sampling_params(raw: Mapping[str, Any] | None, vocab_size: int) -> SamplingParams:
    """Read the `sampling_params` of a request.

    Raises:
        BadBody: It is not an object.
        BadSchema: A key is unknown, or a value has the wrong type.
        BadRequest: A value is out of its range, or asks for what this engine cannot do.
    """
    if not raw:
        return DEFAULT
    if not isinstance(raw, Mapping):
        raise BadBody("sampling_params: Input should be a valid dictionary")
    given = {key: value for key, value in raw.items() if value is not None}
    for key in raw:
        if key not in KNOWN:
            raise BadSchema(f"unknown field `{key}`, expected one of {', '.join(f'`{name}`' for name in KNOWN)}")
    values: dict[str, Any] = {key: _typed(key, given[key]) for key in given if key not in IGNORED}
    params = SamplingParams(**_greedy_made_explicit(values))
    _check_ranges(params, vocab_size)
    return params


def _typed(key: str, value: Any) -> Any:
    """The value in our type."""
    if key in UNSUPPORTED:
        raise BadRequest(f"{key} is not supported by the built-in engine; use SGLang for it.")
    if key in INTEGERS:
        return _require(key, value, isinstance(value, int) and not isinstance(value, bool), "i64")
    if key in NUMBERS:
        _require(key, value, isinstance(value, int | float) and not isinstance(value, bool), "f64")
        return float(value)
    if key in BOOLEANS:
        return _require(key, value, isinstance(value, bool), "a boolean")
    return _COLLECTIONS[key](value)


def _stop(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    _require("stop", value, _all_are(strings, str), "a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(strings)}")
    return tuple(text for text in strings if text)


def _stop_token_ids(value: Any) -> frozenset[int]:
    return frozenset(_require("stop_token_ids", value, _all_are(value, int), "a list of integers"))


def _logit_bias(value: Any) -> dict[int, float]:
    _require("logit_bias", value, isinstance(value, dict) and _all_are(list(value.values()), int | float), "an object")
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except ValueError as error:
        raise BadSchema(f"invalid type: logit_bias must have token ids as keys: {error}") from error


_COLLECTIONS = {"stop": _stop, "stop_token_ids": _stop_token_ids, "logit_bias": _logit_bias}


def _all_are(values: Any, kind: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)


def _require(key: str, value: Any, holds: bool, expected: str) -> Any:
    if not holds:
        raise BadSchema(f"invalid type: {_kind(value)}, expected {expected} for `{key}`")
    return value


def _kind(value: Any) -> str:
    """How serde, which reads requests in SGLang, calls a JSON value."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value}"'
    if isinstance(value, int | float):
        return f"{'integer' if isinstance(value, int) else 'floating point'} `{value}`"
    return "map" if isinstance(value, dict) else "sequence"


def _greedy_made_explicit(values: dict[str, Any]) -> dict[str, Any]:
    if 0 <= values.get("temperature", 1.0) < GREEDY_BELOW:
        return values | {"temperature": 1.0, "top_k": 1}
    return values


RANGES: tuple[tuple[Callable[[SamplingParams], bool], str], ...] = (
    (
        lambda p: math.isfinite(p.temperature) and p.temperature >= 0,
        "temperature must be a non-negative finite number, got {p.temperature}.",
    ),
    (lambda p: 0 < p.top_p <= 1, "top_p must be in (0, 1], got {p.top_p}."),
    (lambda p: 0 <= p.min_p <= 1, "min_p must be in [0, 1], got {p.min_p}."),
    (lambda p: p.top_k == -1 or p.top_k >= 1, "top_k must be -1 (disable) or at least 1, got {p.top_k}."),
    (
        lambda p: -2 <= p.frequency_penalty <= 2,
        "frequency_penalty must be in [-2, 2], got {p.frequency_penalty}.",
    ),
    (
        lambda p: -2 <= p.presence_penalty <= 2,
        "presence_penalty must be in [-2, 2], got {p.presence_penalty}.",
    ),
    (
        lambda p: 0 < p.repetition_penalty <= 2,
        "repetition_penalty must be in (0, 2] (1.0 = no penalty), got {p.repetition_penalty}.",
    ),
    (lambda p: p.max_new_tokens >= 0, "max_new_tokens must be at least 0, got {p.max_new_tokens}."),
    (
        lambda p: 0 <= p.min_new_tokens <= p.max_new_tokens,
        "min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got {p.min_new_tokens}.",
    ),
    (
        lambda p: p.sampling_seed is None or -(2**63) <= p.sampling_seed < 2**63,
        "sampling_seed must be in [-2**63, 2**63 - 1], got {p.sampling_seed}.",
    ),
)
"""What holds for acceptable parameters, and SGLang's words where it does not."""


def _check_ranges(params: SamplingParams, vocab_size: int) -> None:
    for holds, message in RANGES:
        if not holds(params):
            raise BadRequest(message.format(p=params))
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"logit_bias must has keys in [0, {vocab_size - 1}], got {token}.")
