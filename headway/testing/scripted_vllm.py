"""vLLM's routes for RL (0.32; 0.33 where `rejects_in_pause`) over a scripted model: those that a controller uses.

ids are aborted as `generate-tokens-<request_id>`       log-probs are raw unless the script says processed
an id outside the vocabulary is a 400                   reload_weights leaves the version's name as it is
streams carry what is new, the spans come last          a pause by abort ends requests with all their tokens
"""

import asyncio
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from headway.testing.scripted_engine import ScriptedEngine, reply, stream
from headway.testing.scripted_model import CONTEXT_LENGTH, VOCABULARY, Pause, ScriptedModel, ScriptedRequest

MODEL = "policy"
PAUSES = {"abort": Pause.ABORT, "keep": Pause.IN_PLACE}


def routes(engine: ScriptedEngine) -> list[web.RouteDef]:
    server = ScriptedVLLM(engine)
    return [
        web.post("/inference/v1/generate", server.generate),
        web.post("/abort_requests", server.abort_requests),
        web.post("/pause", server.pause),
        web.post("/resume", server.resume),
        web.get("/is_paused", server.is_paused),
        web.post("/collective_rpc", server.collective_rpc),
        web.post("/update_weight_version", server.update_weight_version),
        web.get("/weight_info", server.weight_info),
        web.get("/v1/models", server.models),
        web.get("/server_info", server.server_info),
        web.get("/health", server.health),
    ]


class ScriptedVLLM:
    """The handlers."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._label = engine.model.label

    @property
    def _model(self) -> ScriptedModel:
        return self._engine.model

    async def generate(self, request: web.Request) -> web.StreamResponse:
        script, body = self._engine.script, await request.json()
        if script.generate_errors:
            status, error = script.generate_errors.pop(0)
            return reply(error, status)
        refusal = _refusal(body)
        if refusal is not None:
            return reply({"error": {"message": refusal[1], "code": refusal[0]}}, refusal[0])
        if script.rejects_in_pause and self._model.pause is Pause.ABORT:
            return reply({"error": {"message": "generation is paused", "code": 503}}, 503)
        item = _item(body)
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        sent = 0

        def on_progress(item: ScriptedRequest) -> None:
            nonlocal sent
            event, sent = self._event(body["request_id"], item, sent), len(item.ids)
            edited = script.edit_event(event)
            events.put_nowait(edited if isinstance(edited, bytes) else orjson.dumps(edited))
            if item.finish is not None:
                events.put_nowait(None)

        item.on_progress = on_progress
        await self._model.add([item])
        try:
            return await stream(request, events)
        finally:
            self._model.abort([item.rid])

    def _event(self, request_id: str, item: ScriptedRequest, sent: int) -> dict[str, Any]:
        tokens = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(item.ids[sent:], item.logprobs[sent:], strict=True)
        ]
        finish = item.finish or {}
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish.get("type"),
            "stop_reason": finish.get("matched"),
            "token_ids": item.ids[sent:],
            "logprobs": {"content": tokens},
        }
        if item.finish is not None:
            choice["weight_versions"] = [
                {"version": label, "start": start, "end": end} for label, start, end in item.spans
            ]
        return {"request_id": f"generate-tokens-{request_id}", "model": MODEL, "choices": [choice]}

    async def abort_requests(self, request: web.Request) -> web.Response:
        rids = (await request.json()).get("request_ids") or [f"generate-tokens-{rid}" for rid in self._model.requests]
        prefix = "generate-tokens-"
        self._model.abort(rid.removeprefix(prefix) for rid in rids if rid.startswith(prefix))
        return reply({"status": "aborted", "aborted": len(rids)})

    async def pause(self, request: web.Request) -> web.Response:
        self._model.hold(PAUSES[request.query.get("mode", "abort")])
        return reply({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self._model.resume()
        return reply({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return reply({"is_paused": self._model.pause is not Pause.NONE})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        script, path = self._engine.script, body["kwargs"]["weights_path"]
        if script.update == "hang":
            await asyncio.Event().wait()
        if script.update == "fail" or not await asyncio.to_thread(Path(path).is_dir):
            return reply({"error": {"message": "worker failed", "code": 500}}, 500)
        self._engine.model_path = path
        return reply({"results": [None]})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        label = (await request.json())["new_version"]
        if self._engine.script.update != "lie":
            self._model.label = label
        return reply({"success": True, "new_version": label})

    async def weight_info(self, request: web.Request) -> web.Response:
        return reply({"weight_version": self._model.label})

    async def models(self, request: web.Request) -> web.Response:
        return reply({"object": "list", "data": [{"id": MODEL, "max_model_len": CONTEXT_LENGTH}]})

    async def server_info(self, request: web.Request) -> web.Response:
        script = self._engine.script
        settings = {"logprobs_mode": script.logprobs_mode, "skip_tokenizer_init": script.skip_tokenizer_init}
        return reply({"vllm_config": {"model_config": settings}})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.script.is_ready else 503)


def _refusal(body: dict[str, Any]) -> tuple[int, str] | None:
    """Status and message, for what vLLM refuses."""
    ids = body["token_ids"]
    if body["model"] != MODEL:
        return 404, f"The model `{body['model']}` does not exist."
    if not ids:
        return 400, "token_ids must not be empty"
    if not all(0 <= token < VOCABULARY for token in ids):
        return 400, f"Token id {max(ids)} is out of vocabulary"
    if len(ids) >= CONTEXT_LENGTH:
        return 400, f"The prompt has {len(ids)} tokens, the context {CONTEXT_LENGTH}"
    return None


def _item(body: dict[str, Any]) -> ScriptedRequest:
    parameters = body["sampling_params"]
    room = CONTEXT_LENGTH - len(body["token_ids"])
    return ScriptedRequest(
        rid=body["request_id"],
        prompt=body["token_ids"],
        max_new_tokens=min(parameters.get("max_tokens", 16), room),
        min_new_tokens=parameters.get("min_tokens", 0),
        stop=tuple(parameters.get("stop") or ()),
        stop_token_ids=tuple(parameters.get("stop_token_ids") or ()),
        ignore_eos=parameters.get("ignore_eos", False),
    )
