"""The controller's door for people: JSON (documented at `/docs`) and metrics for Prometheus. Read only."""

import time
from collections.abc import Callable

from fastapi import FastAPI, Response

from headway.runtime.metrics import CONTENT_TYPE_LATEST, expose
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.metrics import controller_registry
from services.rollout_controller.status import ControllerReport, ControllerStatus, Status


def make_http_api(
    status: Status, controller: RolloutController, clock: Callable[[], float] = time.monotonic
) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="Headway rollout controller", version="1", redoc_url=None)
    registry = controller_registry(status, controller, clock)

    @app.get("/v1/status", summary="What is going on, and what is waited for")
    async def get_status() -> ControllerStatus:
        return status.status(clock())

    @app.get("/v1/report", summary="The status with the history of all steps")
    async def get_report() -> ControllerReport:
        return await status.report(clock())

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def get_metrics() -> Response:
        return Response(expose(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health", summary="200 while the event loop answers")
    async def get_health() -> dict[str, str]:
        return {"status": "ok"}

    return app
