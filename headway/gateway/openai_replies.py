"""What `openai` clients get: completions whole, and as the chunks of a stream.

A stream's text comes in the pieces of its tokens. It begins when the answer is complete: tokens of a lost engine are
given up and made again, so nothing is shown before it is certain.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from headway.gateway.calls import Answer

Reply = dict[str, Any]
TokenText = Callable[[int], str]
MAX_CHUNKS = 64
"""Pieces of a streamed text."""


def chat_completion(id: str, model: str, answers: Sequence[Answer], text_of: TokenText | None) -> Reply:
    """A `chat.completion`.

    Args:
        text_of: The text of a token, where log-probabilities are asked for.
    """
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _chat_logprobs(answer, text_of) if text_of is not None else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(id, "chat.completion", model), "choices": choices, "usage": usage(answers)}


def chat_chunks(
    id: str, model: str, answers: Sequence[Answer], text_of: TokenText | None, includes_usage: bool
) -> Iterator[Reply]:
    """The `chat.completion.chunk`s of a stream."""
    head = _head(id, "chat.completion.chunk", model)
    for index, answer in enumerate(answers):
        deltas: list[Reply] = [{"role": "assistant", "content": ""}, *({"content": p} for p in pieces(answer.text))]
        deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(_calls(answer))]
        for number, delta in enumerate(deltas):
            logprobs = _chat_logprobs(answer, text_of) if text_of is not None and number == 0 else None
            yield {**head, "choices": [_choice(index, delta, None, logprobs)]}
        yield {**head, "choices": [_choice(index, {}, answer.finish_reason, None)]}
    if includes_usage:
        yield {**head, "choices": [], "usage": usage(answers)}


def completion(id: str, model: str, answers: Sequence[Answer], text_of: TokenText | None) -> Reply:
    """A `text_completion`."""
    choices = [_text_choice(index, answer, answer.text, text_of) for index, answer in enumerate(answers)]
    return {**_head(id, "text_completion", model), "choices": choices, "usage": usage(answers)}


def completion_chunks(
    id: str, model: str, answers: Sequence[Answer], text_of: TokenText | None, includes_usage: bool
) -> Iterator[Reply]:
    """The chunks of a streamed `text_completion`."""
    head = _head(id, "text_completion", model)
    for index, answer in enumerate(answers):
        *first, last = pieces(answer.text) or [""]
        for piece in first:
            yield {**head, "choices": [{"index": index, "text": piece, "finish_reason": None, "logprobs": None}]}
        yield {**head, "choices": [_text_choice(index, answer, last, text_of)]}
    if includes_usage:
        yield {**head, "choices": [], "usage": usage(answers)}


def usage(answers: Sequence[Answer]) -> Reply:
    """Tokens of the prompt, and of all answers."""
    prompt, made = answers[0].num_prompt_tokens, sum(answer.turn.response.output_len for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def models(names: Sequence[str]) -> Reply:
    """The list of models."""
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> Reply:
    """One model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "headway"}


def error(status: int, message: str, parameter: str | None, code: str | None) -> Reply:
    """An error's body."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def pieces(text: str) -> list[str]:
    """A text in at most `MAX_CHUNKS` pieces of equal length."""
    size = max(1, -(-len(text) // MAX_CHUNKS))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _head(id: str, kind: str, model: str) -> Reply:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def _message(answer: Answer) -> Reply:
    message: Reply = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message |= {"content": answer.text or None, "tool_calls": _calls(answer)}
    return message


def _calls(answer: Answer) -> list[Reply]:
    return [
        {
            "id": id,
            "type": "function",
            "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
        }
        for id, call in answer.calls
    ]


def _choice(index: int, delta: Reply, finish_reason: str | None, logprobs: Reply | None) -> Reply:
    return {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}


def _text_choice(index: int, answer: Answer, text: str, text_of: TokenText | None) -> Reply:
    return {
        "index": index,
        "text": text,
        "finish_reason": answer.finish_reason,
        "logprobs": _text_logprobs(answer, text_of) if text_of is not None else None,
    }


def _chat_logprobs(answer: Answer, text_of: TokenText) -> Reply:
    response = answer.turn.response
    pairs = zip(map(text_of, response.output_tokens), response.output_logprobs, strict=True)
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []} for text, logprob in pairs
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(answer: Answer, text_of: TokenText) -> Reply:
    response = answer.turn.response
    tokens = list(map(text_of, response.output_tokens))
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": response.output_logprobs,
        "top_logprobs": None,
        "text_offset": offsets[: len(tokens)],
    }
