"""A server that speaks SGLang's or vLLM's HTTP and generates by a script: what the fleet is tested against.

    async with ScriptedEngine("sglang", label="v1.0") as engine:     # engine.url
        ...                                                          # send requests
        await engine.model.wait_for_requests(2)
        engine.model.advance(5)                                      # five tokens for each of them

Every call is kept in `engine.calls`, as (path, body). Faults: `engine.script`, and `kill` / `start` for a lost process.
With `tokens_per_s` it advances by itself, in real time; that is how it stands in for an engine in demonstrations:

    python -m headway.testing.scripted_engine --port 30000 --tokens-per-s 200
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import orjson
from aiohttp import web

from headway.testing.scripted_model import NextToken, ScriptedModel, count_up

TICK_S = 0.01
MAX_BODY_BYTES = 1 << 30


@dataclass
class Script:
    """How the server misbehaves; the default is not at all."""

    edit_event: Callable[[dict[str, Any]], dict[str, Any] | bytes] = lambda event: event
    """Changes each event of a stream before it is sent; bytes are sent as they are."""
    generate_errors: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Statuses and bodies that answer the next calls of generate, first in first out."""
    update: Literal["ok", "fail", "not_flushed", "lie", "hang"] = "ok"
    """How a weight update ends: well; refused; loaded but not flushed; reported but not done; never."""
    is_incremental: bool = False
    """Streams carry what is new, not everything so far (SGLang's --incremental-streaming-output)."""
    logprobs_mode: str = "processed_logprobs"
    """vLLM's flag."""
    is_ready: bool = True
    skip_tokenizer_init: bool = False
    rejects_in_pause: bool = False
    """vLLM 0.33: requests during a pause by abort get a 503; 0.32: they wait."""


class ScriptedEngine:
    """One server process, in this process."""

    def __init__(
        self,
        kind: Literal["sglang", "vllm"] = "sglang",
        *,
        label: str = "v1.0",
        next_token: NextToken = count_up,
        tokens_per_s: float | None = None,
        max_running: int = 256,
    ) -> None:
        """`tokens_per_s` of each request: None advances by hand, infinity answers at once."""
        self.kind = kind
        self.script = Script()
        self.calls: list[tuple[str, Any]] = []
        self.keys: dict[str, str | None] = {}
        """The Authorization header of the last call, by path."""
        self.model = ScriptedModel(label, next_token, max_running)
        self.model_path = "scripted"
        self.health_calls_in_pause = 0
        self._tokens_per_s = tokens_per_s
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._driver: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; after `kill` on the same port, as a new process with the same label."""
        from headway.testing import scripted_sglang, scripted_vllm

        routes = scripted_sglang.routes if self.kind == "sglang" else scripted_vllm.routes
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._record])
        app.add_routes(routes(self))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port or self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        if self._tokens_per_s is not None:
            self._driver = asyncio.create_task(self._drive(self._tokens_per_s))

    async def kill(self) -> None:
        """End as a killed process does: connections are cut, requests are gone."""
        if self._driver is not None:
            self._driver.cancel()
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self.cut_connections(runner)
        await runner.cleanup()
        self.model = ScriptedModel(self.model.label, self.model.next_token, self.model.max_running)

    def cut_connections(self, runner: web.AppRunner | None = None) -> None:
        """Reset every open connection, as a crash or a failing network does."""
        server = (runner or self._runner or web.AppRunner(web.Application())).server
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()

    def calls_of(self, path: str) -> list[Any]:
        """The bodies that were sent to a path."""
        return [body for called, body in self.calls if called == path]

    @web.middleware
    async def _record(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        raw = await request.read()
        self.keys[request.path] = request.headers.get("Authorization")
        self.calls.append((request.path, orjson.loads(raw) if raw else None))
        return await handler(request)

    async def _drive(self, tokens_per_s: float) -> None:
        """Advance in real time, in whole tokens."""
        owed = 0.0
        while True:
            if tokens_per_s == float("inf"):
                self.model.advance(8)
                await asyncio.sleep(0 if self.model.requests else 0.001)
                continue
            await asyncio.sleep(TICK_S)
            owed += TICK_S * tokens_per_s
            self.model.advance(int(owed))
            owed -= int(owed)


def reply(body: Any, status: int = 200) -> web.Response:
    """A JSON reply."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def stream(request: web.Request, events: asyncio.Queue[bytes | None]) -> web.StreamResponse:
    """Server-sent events from a queue, until None."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    is_over = False
    while not is_over:
        parts = [await events.get()]
        while not events.empty():
            parts.append(events.get_nowait())
        is_over = parts[-1] is None
        payload = b"".join(b"data: " + part + b"\n\n" for part in parts if part is not None)
        await response.write(payload + (b"data: [DONE]\n\n" if is_over else b""))
    return response


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headway.testing.scripted_engine")
    parser.add_argument("--kind", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens-per-s", type=float, default=100.0)
    parser.add_argument("--label", default="default", help="the version it serves at first")
    parser.add_argument("--incremental", action="store_true", help="streams carry what is new")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> None:
    engine = ScriptedEngine(arguments.kind, label=arguments.label, tokens_per_s=arguments.tokens_per_s)
    engine.script.is_incremental = arguments.incremental
    await engine.start(arguments.host, arguments.port)
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
