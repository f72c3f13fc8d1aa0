"""The HTTP door of services that have no other: `/metrics` for Prometheus, `/health` for probes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from headway.errors import InvalidInput
from headway.runtime.metrics import CONTENT_TYPE_LATEST, CollectorRegistry, expose


def metrics_app(registry: CollectorRegistry) -> web.Application:
    """The application; more routes may be added."""

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(body=expose(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def get_health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/metrics", get_metrics), web.get("/health", get_health)])
    return app


@asynccontextmanager
async def serve_app(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the block is left; yields the bound port.

    Raises:
        InvalidInput: The port is in use.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise InvalidInput(
                f"cannot serve HTTP on {host}:{port}: {error.strerror} (0 takes any free port)"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
