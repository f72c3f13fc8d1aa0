"""Find the tool calls in what a model has written; a plug-in point, as models write them in different ways.

A parser is a function `(text, names of the offered tools) -> Said`. A call that cannot be read, or is of a tool that
was not offered, is no call: the whole answer is then plain text, which is what the model will see of it too.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from headway.errors import InvalidInput
from headway.workflow.load import load_object

HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer says: a text, and calls after it."""

    text: str
    calls: Sequence[ToolCall] = ()


ToolParser = Callable[[str, Collection[str]], Said]


def hermes(text: str, tools: Collection[str]) -> Said:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen 2.5 and 3.

    Example:
        >>> hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ["add"]).calls
        [ToolCall(name='add', arguments={'a': 1})]
    """
    calls = [_call(found, tools, "arguments") for found in HERMES.findall(text)]
    if not calls or "<tool_call>" in HERMES.sub("", text):
        return Said(text)
    return _said(text, text.partition("<tool_call>")[0], calls)


def llama3_json(text: str, tools: Collection[str]) -> Said:
    """`{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.1 and later."""
    return _said(text, "", [_call(text.removeprefix("<|python_tag|>"), tools, "parameters")])


PARSERS: dict[str, ToolParser] = {"hermes": hermes, "llama3_json": llama3_json}


def find_parser(name: str) -> ToolParser:
    """A parser by its name here, or by import path.

    Raises:
        InvalidInput: There is none.
    """
    if name in PARSERS:
        return PARSERS[name]
    if "." not in name:
        raise InvalidInput(f"tool_parser: no parser {name!r}; there are {', '.join(PARSERS)}, and import paths")
    parser: ToolParser = load_object(name)
    return parser


def _said(whole: str, text: str, calls: Sequence[ToolCall | None]) -> Said:
    read = [call for call in calls if call is not None]
    return Said(text.strip(), read) if len(read) == len(calls) else Said(whole)


def _call(text: str, tools: Collection[str], key: str) -> ToolCall | None:
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or call.get("name") not in tools:
        return None
    arguments = call.get(key, {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None
