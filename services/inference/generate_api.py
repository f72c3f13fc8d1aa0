"""POST /generate, as SGLang 0.5.23 answers it: read, refuse or run, reply in JSON or as server-sent events.

A plain ASGI endpoint: at a few tokens a request, the cost of a framework would be larger than that of the model.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.types import Receive, Scope, Send

from services.inference.engine import Engine
from services.inference.parameters import BadRequest, BadSchema, SamplingParams, read_sampling_params
from services.inference.rows import Progress, Request

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
UNSUPPORTED = (
    "input_embeds",
    "lora_path",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "return_sampling_mask",
    "return_entropy",
    "custom_logit_processor",
    "session_params",
    "image_data",
    "video_data",
    "audio_data",
)
"""Top-level keys that would change the answer, and that this engine does not do."""


class Disconnected(Exception):
    """The client went away before its answer."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client wants to see of the result."""

    stream: bool
    return_logprob: bool
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    is_batch: bool


class GenerateEndpoint:
    """The ASGI endpoint, and who is in flight."""

    def __init__(self, engine: Engine, rng: np.random.Generator) -> None:
        self.live: dict[str, Request] = {}
        """Requests in flight by rid."""
        self._engine = engine
        self._rng = rng

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        try:
            raw = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            return await _reply(send, 400, bad_request_body(f"JSON decode error: {error}"))
        try:
            wanted, prompts, rids, params = self._read(raw)
        except BadSchema as error:
            return await _reply(send, 400, {"error": str(error)})
        except BadRequest as error:
            return await self._refuse(send, error, isinstance(raw, dict) and raw.get("stream") is True)
        news: asyncio.Queue[tuple[int, Progress] | None] = asyncio.Queue()
        requests = [
            self._request(i, *item, wanted, news) for i, item in enumerate(zip(rids, prompts, params, strict=True))
        ]
        self.live.update((request.rid, request) for request in requests)
        watcher = asyncio.ensure_future(_watch_disconnect(receive, news))
        self._engine.submit(requests)
        try:
            if wanted.stream:
                await self._stream(send, wanted, requests, news)
            else:
                await self._answer(send, wanted, requests, news)
        except Disconnected:
            await self.abort({request.rid for request in requests}.__contains__)
        finally:
            watcher.cancel()
            for request in requests:
                self.live.pop(request.rid, None)
        return None

    async def abort(self, matches: Callable[[str], bool]) -> None:
        """End the requests whose rid matches."""
        await self._engine.call(partial(self._engine.abort, lambda request: matches(request.rid)))

    # --- reading

    def _read(self, raw: Any) -> tuple[Wanted, list[list[int]], list[str], list[SamplingParams]]:
        if not isinstance(raw, dict):
            raise BadSchema("invalid type: expected struct GenerateRequest")
        for key in UNSUPPORTED:
            if raw.get(key):
                raise BadRequest(f"{key} is not supported by the built-in engine; use SGLang for it.")
        if (raw.get("logprob_start_len") or -1) >= 0:
            raise BadRequest("logprob_start_len is not supported by the built-in engine; use SGLang for it.")
        prompts, is_batch = self._prompts(raw)
        params = self._params(raw.get("sampling_params"), len(prompts))
        copies = params[0].n if params else 1
        rids = self._rids(raw.get("rid"), len(prompts) * copies, is_batch or copies > 1)
        prompts, params = [p for p in prompts for _ in range(copies)], [p for p in params for _ in range(copies)]
        for prompt, item in zip(prompts, params, strict=True):
            self._check_prompt(prompt, item)
        wanted = Wanted(
            stream=_flag(raw, "stream"),
            return_logprob=_flag(raw, "return_logprob"),
            return_text_in_logprobs=_flag(raw, "return_text_in_logprobs"),
            return_prompt_token_ids=_flag(raw, "return_prompt_token_ids"),
            is_batch=is_batch or copies > 1,
        )
        return wanted, prompts, rids, params

    def _prompts(self, raw: dict[str, Any]) -> tuple[list[list[int]], bool]:
        text, ids = raw.get("text"), raw.get("input_ids")
        if text is not None:
            texts = [text] if isinstance(text, str) else text
            if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
                raise BadSchema("invalid type: expected a string or a list of strings for `text`")
            return [self._engine.detokenizer.encode(item) for item in texts], not isinstance(text, str)
        if ids is None:
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        if not isinstance(ids, list):
            raise BadSchema("invalid type: expected a sequence for `input_ids`")
        if not ids:
            raise BadRequest("input_ids cannot be empty.")
        is_batch = isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
        for prompt in prompts:
            if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
                raise BadSchema("invalid type: expected integers in `input_ids`")
        return prompts, is_batch

    def _params(self, raw: Any, count: int) -> list[SamplingParams]:
        if not isinstance(raw, list):
            return [read_sampling_params(raw, self._engine.model.vocab_size)] * count
        params = [read_sampling_params(item, self._engine.model.vocab_size) for item in raw]
        if len(params) != count:
            raise BadRequest("The length of sampling_params should be equal to the batch size.")
        if len({item.n for item in params}) > 1:
            raise BadRequest("The parallel_sample_num should be the same for all samples in sample params.")
        return params

    def _rids(self, raw: Any, count: int, is_batch: bool) -> list[str]:
        if raw is None:
            rids = [uuid.uuid4().hex for _ in range(count)]
        elif isinstance(raw, str):
            rids = [f"{raw}_{index}" for index in range(count)] if is_batch else [raw]
        elif isinstance(raw, list) and all(isinstance(rid, str) for rid in raw):
            rids = raw
        else:
            raise BadSchema("invalid type: expected a string or a list of strings for `rid`")
        if len(rids) != count:
            raise BadRequest("The specified rids length mismatch with the batch_size for batch processing.")
        seen: set[str] = set()
        for rid in rids:
            if rid in self.live or rid in seen:
                raise BadRequest(f"Duplicate request ID detected: {rid}")
            seen.add(rid)
        return rids

    def _check_prompt(self, prompt: list[int], params: SamplingParams) -> None:
        vocab_size, context = self._engine.model.vocab_size, self._engine.model.context_length
        if not prompt:
            raise BadRequest("input_ids cannot be empty.")
        if len(prompt) >= context:
            raise BadRequest(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            )
        if len(prompt) + params.max_new_tokens > context:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {len(prompt) + params.max_new_tokens} tokens: {len(prompt)} tokens from the input "
                f"messages and {params.max_new_tokens} tokens for the completion. Please reduce the number of tokens "
                "in the input messages or the completion to fit within the limit."
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise BadRequest(f"Token id {wrong} is out of vocabulary: the model has ids 0 to {vocab_size - 1}.")

    def _request(
        self,
        index: int,
        rid: str,
        prompt: list[int],
        params: SamplingParams,
        wanted: Wanted,
        news: "asyncio.Queue[tuple[int, Progress] | None]",
    ) -> Request:
        seed = params.sampling_seed
        if seed is None:
            seed = int(self._rng.integers(2**63))
        stops = self._engine.eos_ids | params.stop_token_ids
        return Request(
            rid=rid,
            prompt=prompt,
            params=params,
            stop_ids=frozenset() if params.ignore_eos else stops,
            all_stop_ids=stops,
            seed=seed % 2**64,
            stream=wanted.stream,
            deliver=lambda progress: news.put_nowait((index, progress)),
        )

    # --- answering

    async def _answer(
        self,
        send: Send,
        wanted: Wanted,
        requests: list[Request],
        news: "asyncio.Queue[tuple[int, Progress] | None]",
    ) -> None:
        outputs: list[Any] = [None] * len(requests)
        async for index, progress in _ends(news, len(requests)):
            if progress.finish is not None and (status := progress.finish.get("status_code")):
                return await _reply(send, status, error_object(progress.finish["message"], status))
            outputs[index] = self._output(wanted, requests[index], progress)
        return await _reply(send, 200, outputs if wanted.is_batch else outputs[0])

    async def _stream(
        self,
        send: Send,
        wanted: Wanted,
        requests: list[Request],
        news: "asyncio.Queue[tuple[int, Progress] | None]",
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
        async for index, progress in _ends(news, len(requests)):
            output = self._output(wanted, requests[index], progress)
            if wanted.is_batch:
                output["index"] = index
            await _send_event(send, orjson.dumps(output))
        await _send_event(send, b"[DONE]", is_last=True)

    async def _refuse(self, send: Send, error: BadRequest, stream: bool) -> None:
        if not stream:
            return await _reply(send, 400, {"error": {"message": str(error)}})
        body = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
        await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
        await _send_event(send, orjson.dumps({"error": body}))
        return await _send_event(send, b"[DONE]", is_last=True)

    def _output(self, wanted: Wanted, request: Request, progress: Progress) -> dict[str, Any]:
        """One result in SGLang's form."""
        now, num_tokens, spans = time.monotonic(), len(progress.output_ids), progress.spans
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": progress.finish,
            "prompt_tokens": len(request.prompt),
            "weight_version": spans[-1][0] if spans else self._engine.label,
            "num_retractions": progress.num_retractions,
        }
        if wanted.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = self._triples(progress, wanted.return_text_in_logprobs)
            meta["output_token_logprobs_length"] = num_tokens
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = num_tokens
        meta["cached_tokens"] = progress.cached_tokens
        if progress.finish is not None:
            meta["weight_versions"] = _version_spans(spans, num_tokens)
        meta["cached_tokens_details"] = meta["dp_rank"] = None
        meta["e2e_latency"] = now - request.arrived_s
        meta["response_sent_to_client_ts"] = time.time()
        output = {"text": self._text(request, progress), "output_ids": progress.output_ids, "meta_info": meta}
        if wanted.return_prompt_token_ids:
            output["prompt_token_ids"] = request.prompt
        return output

    def _triples(self, progress: Progress, with_text: bool) -> list[Any]:
        if not with_text:
            return [
                (logprob, token, None) for logprob, token in zip(progress.logprobs, progress.output_ids, strict=True)
            ]
        return [
            (logprob, token, self._engine.detokenizer.decode([token], False))
            for logprob, token in zip(progress.logprobs, progress.output_ids, strict=True)
        ]

    def _text(self, request: Request, progress: Progress) -> str:
        """The text, without what stopped it unless `no_stop_trim`."""
        matched = progress.finish.get("matched") if progress.finish else None
        trims = not request.params.no_stop_trim
        ids = progress.output_ids[:-1] if trims and isinstance(matched, int) else progress.output_ids
        text = self._engine.detokenizer.decode(ids, request.params.skip_special_tokens)
        return text[: text.find(matched)] if trims and isinstance(matched, str) and matched in text else text


def error_object(message: str, code: int) -> dict[str, Any]:
    """SGLang's error of most routes."""
    return {"object": "error", "message": message, "type": str(code), "param": None, "code": code}


def bad_request_body(message: str) -> dict[str, Any]:
    """SGLang's error for a body that is not what the route expects."""
    return error_object(message, 400) | {"type": "Bad Request"}


def _version_spans(spans: list[tuple[str, int]], num_tokens: int) -> list[dict[str, Any]]:
    ends = [start for _, start in spans[1:]] + [num_tokens]
    return [
        {"version": label, "start": start, "end": end}
        for (label, start), end in zip(spans, ends, strict=True)
        if end > start
    ]


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadSchema(f"invalid type: expected a boolean for `{key}`")
    return bool(value)


async def _ends(news: "asyncio.Queue[tuple[int, Progress] | None]", count: int) -> AsyncIterator[tuple[int, Progress]]:
    """Progress as it comes, until `count` requests have finished."""
    while count:
        item = await news.get()
        if item is None:
            raise Disconnected
        count -= item[1].finish is not None
        yield item


async def _watch_disconnect(receive: Receive, news: "asyncio.Queue[tuple[int, Progress] | None]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    news.put_nowait(None)


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _reply(send: Send, status: int, content: Any) -> None:
    body = orjson.dumps(content)
    headers = [JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_event(send: Send, data: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": not is_last})
