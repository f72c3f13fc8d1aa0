"""SGLang's HTTP contract (0.5.23) over a scripted model: the parts that a rollout controller uses, traps included.

an id outside the vocabulary kills the server            /abort_request matches rids by prefix
flush_cache while requests hold cache: 400, yet updated  /health during a pause marks the server unhealthy
one invalid item makes the whole batch a 400             `weight_versions` comes with the last event only
an aborted, retracted request in an incremental stream repeats its last token and all log-probs
"""

import asyncio
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from headway.testing.scripted_engine import ScriptedEngine, reply, stream
from headway.testing.scripted_model import CONTEXT_LENGTH, VOCABULARY, Pause, ScriptedRequest

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
DEFAULT_INTERVAL = 1


def routes(engine: ScriptedEngine) -> list[web.RouteDef]:
    server = ScriptedSGLang(engine)
    return [
        web.post("/generate", server.generate),
        web.post("/abort_request", server.abort_request),
        web.post("/pause_generation", server.pause_generation),
        web.post("/continue_generation", server.continue_generation),
        web.post("/flush_cache", server.flush_cache),
        web.post("/update_weights_from_disk", server.update_weights_from_disk),
        web.post("/update_weight_version", server.update_weight_version),
        web.get("/model_info", server.model_info),
        web.get("/server_info", server.server_info),
        web.get("/v1/models", server.models),
        web.get("/ready", server.ready),
        web.get("/health", server.health),
    ]


def _set_at_end(event: asyncio.Event, item: ScriptedRequest) -> None:
    if item.finish is not None:
        event.set()


class ScriptedSGLang:
    """The handlers."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._is_healthy = True
        self._tokenizer_label = engine.model.label

    @property
    def _model(self) -> Any:
        return self._engine.model

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self._engine.script.generate_errors:
            status, body = self._engine.script.generate_errors.pop(0)
            return reply(body, status)
        body = await request.json()
        is_batch = bool(body["input_ids"]) and isinstance(body["input_ids"][0], list)
        items = list(self._items(body, is_batch))
        error = next((message for item in items if (message := self._fault_of(item))), None)
        if error is not None:
            return reply({"error": {"message": error}}, 400)
        if any(not 0 <= token < VOCABULARY for item in items for token in item.prompt):
            await self._engine.kill()
            return reply({}, 500)
        if body.get("stream"):
            return await self._stream(request, body, items, is_batch)
        return await self._answer(items, is_batch)

    def _items(self, body: dict[str, Any], is_batch: bool) -> Iterator[ScriptedRequest]:
        prompts = body["input_ids"] if is_batch else [body["input_ids"]]
        rid = body.get("rid") or ([secrets.token_hex(16) for _ in prompts] if is_batch else secrets.token_hex(16))
        rids = rid if is_batch else [rid]
        sampling = body.get("sampling_params") or {}
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        for prompt, rid, parameters in zip(prompts, rids, each, strict=True):
            yield ScriptedRequest(
                rid=rid,
                prompt=prompt,
                max_new_tokens=parameters.get("max_new_tokens", 128),
                min_new_tokens=parameters.get("min_new_tokens", 0),
                stop_token_ids=tuple(parameters.get("stop_token_ids") or ()),
                stop=tuple(parameters.get("stop") or ()),
                ignore_eos=parameters.get("ignore_eos", False),
            )

    def _fault_of(self, item: ScriptedRequest) -> str | None:
        """What makes an item a 400."""
        if not item.prompt:
            return "The input is empty."
        if item.rid in self._model.requests:
            return f"Duplicate request ID detected: {item.rid}"
        if len(item.prompt) >= CONTEXT_LENGTH:
            return (
                f"The input ({len(item.prompt)} tokens) is longer than the model's context length "
                f"({CONTEXT_LENGTH} tokens)."
            )
        if len(item.prompt) + item.max_new_tokens > CONTEXT_LENGTH:
            return f"Requested token count exceeds the model's maximum context length of {CONTEXT_LENGTH} tokens."
        return None

    async def _answer(self, items: list[ScriptedRequest], is_batch: bool) -> web.Response:
        ended = [asyncio.Event() for _ in items]
        for item, event in zip(items, ended, strict=True):
            item.on_progress = partial(_set_at_end, event)
        await self._model.add(items)
        await asyncio.gather(*(event.wait() for event in ended))
        bodies = [self._engine.script.edit_event(self._event(item, 0)) for item in items]
        return reply(bodies if is_batch else bodies[0])

    async def _stream(
        self, request: web.Request, body: dict[str, Any], items: list[ScriptedRequest], is_batch: bool
    ) -> web.StreamResponse:
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        open_items = set(items)
        sent = dict.fromkeys(items, 0)
        index = {item: position for position, item in enumerate(items)}
        interval = self._interval(body)

        def on_progress(item: ScriptedRequest) -> None:
            if item.finish is None and len(item.ids) - sent[item] < interval:
                return
            event = self._event(item, sent[item] if self._engine.script.is_incremental else 0)
            sent[item] = len(item.ids)
            edited = self._engine.script.edit_event({**event, "index": index[item]} if is_batch else event)
            events.put_nowait(edited if isinstance(edited, bytes) else orjson.dumps(edited))
            if item.finish is not None:
                open_items.discard(item)
                if not open_items:
                    events.put_nowait(None)

        for item in items:
            item.on_progress = on_progress
        await self._model.add(items)
        try:
            return await stream(request, events)
        finally:
            self._model.abort(item.rid for item in open_items)

    @staticmethod
    def _interval(body: dict[str, Any]) -> int:
        sampling = body.get("sampling_params") or {}
        first = sampling[0] if isinstance(sampling, list) else sampling
        return int(first.get("stream_interval") or DEFAULT_INTERVAL)

    def _event(self, item: ScriptedRequest, sent: int) -> dict[str, Any]:
        start, logprobs_start = sent, sent
        is_abort = item.finish is not None and item.finish["type"] == "abort"
        if sent and is_abort and self._model.pause is Pause.RETRACT:
            start, logprobs_start = max(0, len(item.ids) - 1), 0
        meta: dict[str, Any] = {
            "id": item.rid,
            "finish_reason": item.finish,
            "prompt_tokens": len(item.prompt),
            "completion_tokens": len(item.ids),
            "weight_version": self._tokenizer_label,
            "num_retractions": item.num_retractions,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(item.logprobs[logprobs_start:], item.ids[logprobs_start:], strict=True)
            ],
            "output_token_logprobs_length": len(item.ids),
        }
        if item.finish is not None:
            meta["weight_versions"] = [
                {"version": label, "start": start, "end": end} for label, start, end in item.spans
            ]
        return {"text": "", "output_ids": item.ids[start:], "meta_info": meta}

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid = body.get("rid", "")
        if body.get("abort_all"):
            self._model.abort(self._model.requests)
        elif rid in self._model.requests:
            self._model.abort(live for live in list(self._model.requests) if live.startswith(rid))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return reply({"error": f"unknown mode {mode}"}, 400)
        self._model.hold(Pause(mode))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await request.json()
        self._model.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        if self._model.is_busy:
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(text="Cache flushed.\n")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        script = self._engine.script
        if script.update == "hang":
            await asyncio.Event().wait()
        if script.update == "fail" or not await asyncio.to_thread(Path(body["model_path"]).is_dir):
            return reply({"success": False, "message": "Failed to get weights iterator"}, 400)
        if self._model.pause is Pause.NONE:
            await self._model.wait_until_empty()
        if script.update == "lie":
            return reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
        return self._update(body)

    def _update(self, body: dict[str, Any]) -> web.Response:
        label = body.get("weight_version")
        self._engine.model_path = body["model_path"]
        self._model.label = label or self._model.label
        if body.get("flush_cache", True) and (self._model.is_busy or self._engine.script.update == "not_flushed"):
            return reply({"success": False, "message": NOT_FLUSHED, "num_paused_requests": 0}, 400)
        self._tokenizer_label = label or self._tokenizer_label
        return reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._model.label = self._tokenizer_label = body["new_version"]
        return reply({"success": True, "message": "Weight version updated.", "new_version": body["new_version"]})

    async def model_info(self, request: web.Request) -> web.Response:
        return reply({"model_path": self._engine.model_path, "weight_version": self._tokenizer_label})

    async def server_info(self, request: web.Request) -> web.Response:
        skip = self._engine.script.skip_tokenizer_init
        return reply({"version": "0.5.23", "frontend": "python", "skip_tokenizer_init": skip})

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self._engine.model_path, "object": "model", "max_model_len": CONTEXT_LENGTH}
        return reply({"object": "list", "data": [model]})

    async def ready(self, request: web.Request) -> web.Response:
        is_ready = self._engine.script.is_ready and self._is_healthy and self._model.pause is Pause.NONE
        return web.Response(status=200 if is_ready else 503)

    async def health(self, request: web.Request) -> web.Response:
        if self._model.pause is not Pause.NONE:
            self._engine.health_calls_in_pause += 1
            self._is_healthy = False
            return web.Response(status=503)
        self._is_healthy = True
        return web.Response()
