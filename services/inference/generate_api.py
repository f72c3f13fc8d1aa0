"""POST /generate, as SGLang 0.5.23 answers it: in JSON, or as server-sent events that grow.

A plain ASGI endpoint: at a few tokens a request, the cost of a framework would be larger than that of the model.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.types import Receive, Scope, Send

from services.inference.engine import Engine
from services.inference.generate_body import GenerateBody, Item, Limits, read_generate_body
from services.inference.parameters import BadBody, BadRequest, BadSchema
from services.inference.rows import Progress, Request

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
News = asyncio.Queue[tuple[int, Progress] | None]
"""(number of the request in its batch, its progress), or None when the client went away."""


class Disconnected(Exception):
    """The client went away before its answer."""


class GenerateEndpoint:
    """The ASGI endpoint, and who is in flight."""

    def __init__(self, engine: Engine, rng: np.random.Generator) -> None:
        self.live: dict[str, Request] = {}
        """Requests in flight by rid."""
        self._engine = engine
        self._rng = rng
        self._limits = Limits(engine.model.vocab_size, engine.model.context_length, engine.detokenizer.encode)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: Any = None
        try:
            raw = orjson.loads(await _read_body(receive))
            body = read_generate_body(raw, self._limits)
            self._check_duplicates(body.items)
            self._check_adapters(body.items)
        except orjson.JSONDecodeError as error:
            await _reply(send, 400, bad_request_body(f"JSON decode error: {error}"))
        except BadBody as error:
            await _reply(send, 400, bad_request_body(str(error)))
        except BadSchema as error:
            await _reply(send, 400, {"error": str(error)})
        except BadRequest as error:
            await (_refuse_stream if raw.get("stream") else _refuse)(send, str(error))
        else:
            await self._run(body, receive, send)

    async def abort(self, matches: Callable[[str], bool]) -> None:
        """End the requests whose rid matches."""
        await self._engine.call(partial(self._engine.abort, lambda request: matches(request.rid)))

    async def _run(self, body: GenerateBody, receive: Receive, send: Send) -> None:
        """Generate and answer; the requests end when the client goes away."""
        news: News = asyncio.Queue()
        requests = [self._request(index, item, body.stream, news) for index, item in enumerate(body.items)]
        self.live.update((request.rid, request) for request in requests)
        watcher = asyncio.ensure_future(_watch_disconnect(receive, news))
        self._engine.submit(requests)
        try:
            await (self._stream if body.stream else self._answer)(send, body, requests, news)
        except Disconnected:
            await self.abort({request.rid for request in requests}.__contains__)
        finally:
            watcher.cancel()
            for request in requests:
                self.live.pop(request.rid, None)

    def _check_duplicates(self, items: list[Item]) -> None:
        for item in items:
            if item.rid in self.live:
                raise BadRequest(f"Duplicate request ID detected: {item.rid}")
        twice = [rid for rid, count in Counter(item.rid for item in items).items() if count > 1]
        if twice:
            raise BadRequest(f"Duplicate request IDs detected within the request: {twice}")

    def _check_adapters(self, items: list[Item]) -> None:
        for item in items:
            if item.adapter is not None and item.adapter not in self._engine.adapters:
                raise BadRequest(
                    f"Got LoRA adapter that has never been loaded: {item.adapter}. "
                    f"All loaded adapters: {list(self._engine.adapters)}."
                )

    def _request(self, index: int, item: Item, stream: bool, news: News) -> Request:
        seed = item.params.sampling_seed
        stops = self._engine.eos_ids | item.params.stop_token_ids
        return Request(
            rid=item.rid,
            prompt=item.prompt,
            params=item.params,
            stop_ids=frozenset() if item.params.ignore_eos else stops,
            all_stop_ids=stops,
            seed=int(self._rng.integers(2**63)) if seed is None else seed % 2**64,
            stream=stream,
            deliver=lambda progress: news.put_nowait((index, progress)),
            adapter=self._engine.adapters[item.adapter] if item.adapter is not None else None,
        )

    async def _answer(self, send: Send, body: GenerateBody, requests: list[Request], news: News) -> None:
        outputs: list[Any] = [None] * len(requests)
        async for arrived in _until_all_end(news, len(requests)):
            for index, progress in arrived:
                if progress.finish is not None and (status := progress.finish.get("status_code")):
                    return await _reply(send, status, error_object(progress.finish["message"], status))
                outputs[index] = self._output(body, requests[index], progress)
        return await _reply(send, 200, outputs if body.is_batch else outputs[0])

    async def _stream(self, send: Send, body: GenerateBody, requests: list[Request], news: News) -> None:
        await _start_events(send)
        async for arrived in _until_all_end(news, len(requests)):
            outputs = [self._output(body, requests[index], progress) for index, progress in arrived]
            if body.is_batch:
                for output, (index, _) in zip(outputs, arrived, strict=True):
                    output["index"] = index
            await _send_events(send, [orjson.dumps(output) for output in outputs])
        await _send_events(send, [b"[DONE]"], is_last=True)

    def _output(self, body: GenerateBody, request: Request, progress: Progress) -> dict[str, Any]:
        """One result in SGLang's form."""
        num_tokens, cached = len(progress.output_ids), progress.cached_tokens
        spans = progress.spans or [(self._engine.label, 0)]  # one that was ended before it ran has none
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": progress.finish,
            "prompt_tokens": len(request.prompt),
            "weight_version": spans[-1][0],
            "num_retractions": progress.num_retractions,
        }
        if body.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = self._triples(progress, body.return_text_in_logprobs)
            meta["output_token_logprobs_length"] = num_tokens
        meta |= {"reasoning_tokens": 0, "completion_tokens": num_tokens, "cached_tokens": cached}
        if progress.finish is not None:
            meta["weight_versions"] = version_spans(spans, num_tokens)
            meta["e2e_latency"] = time.monotonic() - request.arrived_s
        meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
        meta |= {"dp_rank": None, "response_sent_to_client_ts": time.time()}
        output = {"text": self._text(request, progress), "output_ids": progress.output_ids, "meta_info": meta}
        if body.return_prompt_token_ids:
            output["prompt_token_ids"] = request.prompt
        return output

    def _triples(self, progress: Progress, with_text: bool) -> list[tuple[float, int, str | None]]:
        pairs = zip(progress.logprobs, progress.output_ids, strict=True)
        if not with_text:
            return [(logprob, token, None) for logprob, token in pairs]
        return [(logprob, token, self._engine.detokenizer.decode([token], False)) for logprob, token in pairs]

    def _text(self, request: Request, progress: Progress) -> str:
        """The text; without what stopped it unless `no_stop_trim`, and without half a character while it runs."""
        matched = progress.finish.get("matched") if progress.finish else None
        keeps_stop = request.params.no_stop_trim
        ids = progress.output_ids[:-1] if isinstance(matched, int) and not keeps_stop else progress.output_ids
        text = self._engine.detokenizer.decode(ids, request.params.skip_special_tokens)
        if progress.finish is None:
            return text.rstrip("\ufffd")
        if isinstance(matched, str) and matched in text:
            return text[: text.find(matched) + (len(matched) if keeps_stop else 0)]
        return text


def version_spans(spans: list[tuple[str, int]], num_tokens: int) -> list[dict[str, Any]]:
    """[start, end) of the output tokens that each version of the weights made; one empty span if there are none.

    Example:
        >>> version_spans([("v1.0", 0), ("v1.1", 3)], 5)
        [{'version': 'v1.0', 'start': 0, 'end': 3}, {'version': 'v1.1', 'start': 3, 'end': 5}]
    """
    ends = [start for _, start in spans[1:]] + [num_tokens]
    ranges = [(label, start, end) for (label, start), end in zip(spans, ends, strict=True)]
    filled = [span for span in ranges if span[1] < span[2]] or ranges[-1:]
    return [{"version": label, "start": start, "end": end} for label, start, end in filled]


def error_object(message: str, code: int) -> dict[str, Any]:
    """SGLang's error of most routes."""
    return {"object": "error", "message": message, "type": str(code), "param": None, "code": code}


def bad_request_body(message: str) -> dict[str, Any]:
    """SGLang's error for a body that is not what the route expects."""
    return error_object(message, 400) | {"type": "Bad Request"}


async def _until_all_end(news: News, count: int) -> AsyncIterator[list[tuple[int, Progress]]]:
    """Progress as it comes, as much at once as there is, until `count` requests have finished.

    Raises:
        Disconnected: The client went away.
    """
    while count:
        items = [await news.get()]
        while not news.empty():
            items.append(news.get_nowait())
        arrived = [item for item in items if item is not None]
        if len(arrived) < len(items):
            raise Disconnected
        count -= sum(progress.finish is not None for _, progress in arrived)
        yield arrived


async def _watch_disconnect(receive: Receive, news: News) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    news.put_nowait(None)


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _reply(send: Send, status: int, content: Any) -> None:
    body = orjson.dumps(content)
    headers = [JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, message: str) -> None:
    await _reply(send, 400, {"error": {"message": message}})


async def _refuse_stream(send: Send, message: str) -> None:
    """What SGLang does once it has begun to answer with a stream."""
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    await _start_events(send)
    await _send_events(send, [orjson.dumps({"error": error}), b"[DONE]"], is_last=True)


async def _start_events(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})


async def _send_events(send: Send, events: list[bytes], is_last: bool = False) -> None:
    body = b"".join(b"data: " + event + b"\n\n" for event in events)
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
