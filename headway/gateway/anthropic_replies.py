"""What `anthropic` clients get: a message whole, and as the events of a stream."""

from collections.abc import Iterator
from typing import Any

import orjson

from headway.gateway.calls import Answer
from headway.gateway.openai_replies import pieces

Reply = dict[str, Any]


def message(id: str, model: str, answer: Answer) -> Reply:
    """A `message`."""
    return {
        **_head(id, model),
        "content": list(_blocks(answer)),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop_string,
        "usage": _usage(answer),
    }


def events(id: str, model: str, answer: Answer) -> Iterator[Reply]:
    """The events of a stream."""
    empty: Reply = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {
        "type": "message_start",
        "message": {**_head(id, model), **empty, "usage": {**_usage(answer), "output_tokens": 0}},
    }
    for index, block in enumerate(_blocks(answer)):
        yield from _block_events(index, block)
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
    yield {"type": "message_delta", "delta": delta, "usage": _usage(answer)}
    yield {"type": "message_stop"}


def error(status: int, text: str) -> Reply:
    """An error's body."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _block_events(index: int, block: Reply) -> Iterator[Reply]:
    if block["type"] == "text":
        start, deltas = (
            {**block, "text": ""},
            [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])],
        )
    else:
        text = orjson.dumps(block["input"]).decode()
        start, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _head(id: str, model: str) -> Reply:
    return {"id": id, "type": "message", "role": "assistant", "model": model}


def _blocks(answer: Answer) -> Iterator[Reply]:
    if answer.text:
        yield {"type": "text", "text": answer.text}
    for id, call in answer.calls:
        yield {"type": "tool_use", "id": id, "name": call.name, "input": call.arguments}


def _stop_reason(answer: Answer) -> str:
    if answer.stop_string is not None and not answer.calls:
        return "stop_sequence"
    return {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[answer.finish_reason]


def _usage(answer: Answer) -> Reply:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.turn.response.output_len}
