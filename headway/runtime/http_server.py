"""An HTTP server inside the running loop: uvicorn, without its signal handlers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from headway.errors import InvalidInput
from headway.runtime.tracing import is_tracing, served_span

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication


class QuietServer(uvicorn.Server):
    """Leaves signals to the service."""

    def install_signal_handlers(self) -> None:
        """Nothing: the service handles signals."""


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # so named, asyncio turns Nagle off
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidInput(f"cannot serve HTTP on {host}:{port}: {error.strerror} (0 takes any free port)") from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class Traced:
    """An application whose answers to traced calls are spans."""

    def __init__(self, app: "ASGIApplication") -> None:
        self._app: Any = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with served_span(f"{scope['method']} {scope['path']}", lambda: scope["headers"]) as note:

            async def noted(message: Any) -> None:
                if message["type"] == "http.response.start":
                    note("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noted)


@asynccontextmanager
async def serve_http(app: "ASGIApplication", host: str, port: int, grace_s: float = 2.0) -> AsyncIterator[int]:
    """Serve until the block is left; yields the bound port.

    Raises:
        InvalidInput: The port is in use.
    """
    listener = _bind(host, port)
    settings = uvicorn.Config(
        Traced(app) if is_tracing() else app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(grace_s)),
        timeout_keep_alive=75,
    )
    server = QuietServer(settings)
    server.config.load()
    server.lifespan = settings.lifespan_class(settings)
    await server.startup(sockets=[listener])
    ticking = asyncio.get_running_loop().create_task(server.main_loop(), name="uvicorn")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await ticking
        await server.shutdown(sockets=[listener])
        listener.close()
