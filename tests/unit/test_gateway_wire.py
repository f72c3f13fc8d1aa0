"""A request's body is read or refused with a reason: no body, however odd, is a bug of ours."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InvalidInput
from headway.gateway.anthropic_requests import CountRequest, MessagesRequest
from headway.gateway.history import history_keys
from headway.gateway.openai_requests import ChatRequest, CompletionRequest
from headway.gateway.render import ChatRenderer
from headway.gateway.wire import parse
from headway.testing.scripted_policy import CharacterTokenizer

MODELS: Any = (ChatRequest, CompletionRequest, MessagesRequest, CountRequest)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({name for model in MODELS for name in (*model.model_fields, *model.neutral, *model.harmless)})
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "c", "content": "1"},
]
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
    optional={
        "content": st.text(max_size=5) | st.lists(st.sampled_from(BLOCKS), max_size=3) | JSON,
        "tool_calls": st.lists(st.just(CALL), max_size=2) | JSON,
        "tool_call_id": st.text(max_size=3),
        "refusal": st.none() | st.text(max_size=3),
    },
)
TOOL = st.sampled_from([
    {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}},
    {"type": "function", "function": {"name": "f"}},
    {"name": "f", "input_schema": {}},
])  # fmt: skip
BODY = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "messages": st.lists(MESSAGE, max_size=4),
        "prompt": st.text(max_size=3) | JSON,
        "max_tokens": st.integers(1, 9),
        "tools": st.lists(TOOL, max_size=2),
    },
)


def read(model: Any, data: bytes) -> None:
    """Everything that is done with a body before the engine is asked."""
    body = parse(model, data)
    if hasattr(body, "chat"):
        chat = body.chat()
        history_keys(list(chat.tools), chat.messages)
        ChatRenderer(CharacterTokenizer()).first(chat.messages, tools=list(chat.tools))
    if isinstance(body, CompletionRequest):
        body.text()


@given(st.sampled_from(MODELS), BODY, st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2))
def test_a_body_is_read_or_refused(model: Any, body: dict[str, Any], more: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidInput):
        read(model, json.dumps(more | body).encode())


@given(st.sampled_from(MODELS), st.binary(max_size=20))
def test_bytes_that_are_no_json_are_refused(model: Any, data: bytes) -> None:
    with pytest.raises(InvalidInput):
        read(model, data)


def test_integers_beyond_64_bits_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    with pytest.raises(InvalidInput, match="cannot be written as JSON"):
        read(ChatRequest, json.dumps(body).encode())
