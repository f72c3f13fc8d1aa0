"""The HTTP contract of SGLang 0.5.23, as far as a rollout controller uses it, in front of the built-in engine.

One difference on purpose: while generation is paused, /health answers 503 at once instead of after 20 s.
"""

import asyncio
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.routing import Route

from headway.errors import HeadwayError
from headway.runtime.metrics import CONTENT_TYPE_LATEST, expose
from services.inference.builtin import BuiltinEngine
from services.inference.engine_metrics import registry_of
from services.inference.generate_api import GenerateEndpoint, bad_request_body

HEALTH_TIMEOUT_S = 20.0
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


class Pause(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(BaseModel):
    torch_empty_cache: bool = True


class Abort(BaseModel):
    rid: str = ""
    abort_all: bool = False


class UpdateFromDisk(BaseModel):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class PrepareFromDisk(BaseModel):
    model_path: str


class UpdateVersion(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class InitGroup(BaseModel):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class Group(BaseModel):
    group_name: str = "weight_update_group"


class BeginUpdate(BaseModel):
    selector: str = "all"


class EndUpdate(BaseModel):
    pass


class UpdateFromDistributed(BaseModel):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class LoadAdapter(BaseModel):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapter(BaseModel):
    lora_name: str


class CheckWeights(BaseModel):
    action: str = "checksum"


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def create_app(builtin: BuiltinEngine) -> FastAPI:
    """The ASGI application in front of a started engine."""
    app = FastAPI(title="Headway built-in engine", default_response_class=Json)
    generate = GenerateEndpoint(builtin.engine, builtin.rng)
    app.router.routes.append(Route("/generate", generate, methods=["POST", "PUT"]))
    app.add_exception_handler(RequestValidationError, _refuse_body)
    _add_control(app, builtin, generate)
    _add_weights(app, builtin)
    _add_group(app, builtin)
    _add_adapters(app, builtin)
    _add_health(app, builtin)
    _add_information(app, builtin)
    return app


async def _refuse_body(_: Request, error: Exception) -> Response:
    return Json(bad_request_body(str(error)), status_code=400)


def _add_control(app: FastAPI, builtin: BuiltinEngine, generate: GenerateEndpoint) -> None:
    engine = builtin.engine

    @app.post("/abort_request")
    async def abort_request(body: Abort) -> Response:
        """End one request (and, as in SGLang, those whose rid begins with its rid), or all."""
        if body.abort_all:
            await generate.abort(lambda rid: True)
        elif body.rid in generate.live:
            await generate.abort(lambda rid: rid.startswith(body.rid))
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(body: Pause) -> dict[str, str]:
        await engine.call(partial(engine.pause, body.mode))
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation(_: Continue) -> dict[str, str]:
        await engine.call(engine.resume)
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: float = Query(0.0, ge=0.0)) -> Response:
        """Forget all prefixes; waits up to `timeout` seconds for the engine to be idle."""
        deadline = time.monotonic() + timeout
        while not (is_flushed := await engine.call(engine.flush_cache)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return Response(FLUSHED if is_flushed else "Flush cache failed.\n", 200 if is_flushed else 400)


def _add_weights(app: FastAPI, builtin: BuiltinEngine) -> None:
    @app.post("/prepare_weights_from_disk")
    async def prepare_weights_from_disk(body: PrepareFromDisk) -> Response:
        """Read a published folder before generation is paused for its update. Not in SGLang."""
        return _outcome(*await _attempt(builtin.prepare_from_disk(body.model_path)))

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateFromDisk) -> Response:
        """Replace the weights by those of a published folder."""
        if body.abort_all_requests:
            await builtin.abort_all()
        result = await _attempt(builtin.update_from_disk(body.model_path, body.weight_version, body.flush_cache))
        return _outcome(*result, num_paused_requests=0)

    @app.post("/update_weight_version")
    async def update_weight_version(body: UpdateVersion) -> Response:
        """Rename the present weights."""
        if body.abort_all_requests:
            await builtin.abort_all()
        await builtin.set_version(body.new_version)
        return _outcome(True, f"Weight version updated to {body.new_version}", new_version=body.new_version)

    @app.api_route("/weights_checker", methods=["GET", "POST"])
    async def weights_checker(body: CheckWeights | None = None) -> Response:
        """Checksums of the parameters, by which a client proves that an update has landed."""
        action = body.action if body else "checksum"
        if action != "checksum":
            return _outcome(False, f"Unsupported action={action!r}")
        sums, total = await builtin.checksums()
        ranks = [{"checksums": sums, "per_gpu_checksum": total, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}]
        return _outcome(True, "Success.", ranks=ranks, per_engine_checksum=total)


def _add_group(app: FastAPI, builtin: BuiltinEngine) -> None:
    @app.post("/init_weights_update_group")
    async def init_weights_update_group(body: InitGroup) -> Response:
        """Join the trainer's process group."""
        return _outcome(*await _attempt(builtin.distributed.join(**body.model_dump())))

    @app.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(body: Group) -> Response:
        return _outcome(*await _attempt(builtin.distributed.leave(body.group_name)))

    @app.post("/begin_weight_update")
    async def begin_weight_update(_: BeginUpdate) -> Response:
        return _outcome(*await _attempt(builtin.distributed.begin()))

    @app.post("/end_weight_update")
    async def end_weight_update(_: EndUpdate) -> Response:
        return _outcome(*await _attempt(builtin.distributed.end()))

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: UpdateFromDistributed) -> Response:
        """Receive tensors that the trainer broadcasts, in the order of `names`."""
        if body.abort_all_requests:
            await builtin.abort_all()
        return _outcome(*await _attempt(builtin.update_from_distributed(**_without(body, "abort_all_requests"))))


def _add_adapters(app: FastAPI, builtin: BuiltinEngine) -> None:
    async def outcome(work: Awaitable[None]) -> Response:
        error = ""
        try:
            await work
        except HeadwayError as refusal:
            error = str(refusal)
        about = {"rid": None, "http_worker_ipc": None, "success": not error, "error_message": error}
        return Json({**about, "loaded_adapters": builtin.adapters}, status_code=400 if error else 200)

    @app.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter) -> Response:
        """Load an adapter beside the model, for requests that name it in `lora_path`."""
        return await outcome(builtin.load_adapter(body.lora_name, body.lora_path))

    @app.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter) -> Response:
        """Take an adapter away. Unlike SGLang this does not wait: requests that run keep theirs."""
        return await outcome(builtin.unload_adapter(body.lora_name))


def _add_health(app: FastAPI, builtin: BuiltinEngine) -> None:
    engine = builtin.engine

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=503 if engine.is_paused else 200)

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        """Whether the engine's thread gets round to a question between two steps."""
        if engine.is_paused:
            return Response(status_code=503)
        try:
            await asyncio.wait_for(engine.call(lambda: None), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    registry = registry_of(builtin)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(expose(registry), media_type=CONTENT_TYPE_LATEST)


def _add_information(app: FastAPI, builtin: BuiltinEngine) -> None:
    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return builtin.model_info()

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return builtin.server_info()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        about = {"object": "model", "created": builtin.started_at, "owned_by": "sglang"}
        name = builtin.served_model_name
        card = {"id": name, **about, "root": name, "parent": None}
        cards = [card | {"max_model_len": builtin.engine.model.context_length}]
        for adapter, path in builtin.adapters.items():
            cards.append({"id": adapter, **about, "root": path, "parent": name, "max_model_len": None})
        return {"object": "list", "data": cards}


async def _attempt(work: Any) -> tuple[bool, str]:
    """Await something that returns (success, message); an error raised on purpose is a failure with its message."""
    try:
        success, message = await work
    except HeadwayError as error:
        return False, str(error)
    return bool(success), str(message)


def _outcome(success: bool, message: str, **more: Any) -> Response:
    return Json({"success": success, "message": message, **more}, status_code=200 if success else 400)


def _without(body: BaseModel, *names: str) -> dict[str, Any]:
    return body.model_dump(exclude=set(names))
