"""The application of `headway view`: the page and its answers for a run's folder, without any service of the run."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, cast

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from headway.errors import HeadwayError
from headway.runtime.http_server import serve_http
from headway.view.finished import KEPT, FinishedRun
from headway.view.folder import RunFolder
from headway.view.page import mount_page
from headway.view.router import trajectories_router
from headway.view.store import Store

HOST = "127.0.0.1"
MAX_STEPS = 10_000


def make_app(run: FinishedRun, store: Store) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="Headway: a finished run", version="1", redoc_url=None, docs_url=None)
    app.add_exception_handler(HeadwayError, _problem)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])  # no web page reads by another name

    @app.get("/v1/status")
    def get_status() -> Response:
        return JSONResponse(run.status())

    @app.get("/v1/metrics/history")
    def get_history(
        name: Annotated[list[str] | None, Query()] = None,
        since_step: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = MAX_STEPS,
    ) -> Response:
        return JSONResponse(run.history(name or [], since_step, limit))

    @app.get("/v1/events", status_code=204)
    def get_events() -> None:
        """Nothing will happen any more."""

    for path in KEPT:
        app.get(path)(_kept(run, path))
    app.include_router(trajectories_router(store))
    mount_page(app)
    return app


async def serve(folder: RunFolder, port: int, tell: Callable[[str], None]) -> None:
    """Serve a run's folder to this machine until the task is cancelled.

    Args:
        port: 0 takes any free one.
        tell: Hears the address.

    Raises:
        InvalidInput: The port is in use.
    """
    run = await asyncio.to_thread(FinishedRun, folder)
    with Store(folder) as store:
        async with serve_http(cast(Any, make_app(run, store)), HOST, port) as bound:
            tell(f"http://{HOST}:{bound}/")
            await asyncio.Event().wait()


def _kept(run: FinishedRun, path: str) -> Callable[[], Response]:
    def get() -> Response:
        return JSONResponse(run.answer(path))

    return get


async def _problem(request: Request, error: Any) -> JSONResponse:
    content = {"title": type(error).__name__, "status": error.http_status, "detail": str(error)}
    return JSONResponse(content, error.http_status, media_type="application/problem+json")
