"""The controller's door for people and programs: JSON (documented at `/docs`) and metrics for Prometheus.

`auth.py` says who may call what, `problems.py` what an error looks like. Every router is mounted here.
"""

import time
from collections.abc import Callable

from fastapi import APIRouter, Depends, FastAPI, Response

from headway.gateway.gateway import Gateway
from headway.runtime.metrics import CONTENT_TYPE_LATEST, expose
from headway.view.page import mount_page
from headway.view.router import trajectories_router
from headway.view.store import Store
from services.rollout_controller.auth import Access, require_control, require_read
from services.rollout_controller.control import Control
from services.rollout_controller.control_api import control_router, settings_router
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.gateway_chat import chat_router
from services.rollout_controller.gateway_sessions import session_router
from services.rollout_controller.live import Live, live_router
from services.rollout_controller.metrics import controller_registry
from services.rollout_controller.openapi import install_openapi
from services.rollout_controller.problems import install_problems
from services.rollout_controller.reading import Records, reading_router
from services.rollout_controller.status import ControllerReport, ControllerStatus, Status
from services.rollout_controller.task_pages import TaskPages
from services.rollout_controller.versions import VersionBook


def make_http_api(
    status: Status,
    controller: RolloutController,
    access: Access | None = None,
    store: Store | None = None,
    gateway: Gateway | None = None,
    live: Live | None = None,
    versions: VersionBook | None = None,
    control: Control | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The ASGI application.

    Args:
        access: Who may call it; None: reading is open, control closed.
        store: The trajectories of the run; None: neither they nor the page are served.
        live: What people watch; None: it is not served.
        versions: What was published; None, or no `live`: versions and tasks are not served.
        control: What people may change; None, or no `live`: nothing.
    """
    app = FastAPI(title="Headway rollout controller", version="1", redoc_url=None)
    app.state.access = access or Access()
    install_problems(app)
    install_openapi(app, app.state.access)
    registry = controller_registry(status, controller, clock)
    read = APIRouter(prefix="/v1", dependencies=[Depends(require_read)])

    @read.get("/status", summary="What is going on, and what is waited for")
    async def get_status() -> ControllerStatus:
        return status.status(clock())

    @read.get("/report", summary="The status with the history of all steps")
    async def get_report() -> ControllerReport:
        return await status.report(clock())

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def get_metrics() -> Response:
        return Response(expose(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health", summary="200 while the event loop answers")
    async def get_health() -> dict[str, str]:
        return {"status": "ok"}

    app.include_router(read)
    if live is not None:
        app.include_router(live_router(live), dependencies=[Depends(require_read)])
    if live is not None and versions is not None:
        records = Records(lambda: status.status(clock()), versions, TaskPages(lambda: controller.ledger, live.people))
        app.include_router(reading_router(records), dependencies=[Depends(require_read)])
    if live is not None and control is not None:
        app.include_router(settings_router(control, live.trainer), dependencies=[Depends(require_read)])
        app.include_router(control_router(control, live.trainer, status), dependencies=[Depends(require_control)])
    if gateway is not None:
        app.include_router(session_router(gateway))
        app.include_router(chat_router(gateway))
    if store is not None:
        app.include_router(trajectories_router(store), dependencies=[Depends(require_read)])
        mount_page(app)
    return app
