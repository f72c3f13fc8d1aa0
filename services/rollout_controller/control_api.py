"""The routes by which people change what goes on. Every change answers with what holds now.

Whoever mounts them says who may call: `require_control`, but for `settings_router`, which only tells.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from headway.errors import NotFound
from services.rollout_controller.control import Control
from services.rollout_controller.problems import responses
from services.rollout_controller.status import ServerStatus, Status
from services.rollout_controller.trainer_link import TrainerLink
from services.rollout_controller.views import (
    CheckpointStatus,
    EvaluationStarted,
    PauseStatus,
    Reason,
    SettingsChange,
    SettingsView,
    Stopping,
    TrainerView,
)

Server = Annotated[str, Path(description="Its name in `/v1/servers`.", examples=["0"])]


def settings_router(control: Control, trainer: TrainerLink) -> APIRouter:
    """What holds now."""
    router = APIRouter(prefix="/v1", tags=["control"])

    @router.get("/settings", summary="What can be changed while the run goes on")
    async def get_settings() -> SettingsView:
        return control.settings()

    @router.get("/pause", summary="Whether new rollouts are held back by a person")
    async def get_pause() -> PauseStatus:
        return control.pause_status()

    @router.get("/trainer", summary="What the leading trainer does", responses=responses(404))
    async def get_trainer() -> TrainerView:
        if (view := trainer.view()) is None:
            raise NotFound("no trainer leads, or it does not answer")
        return view

    return router


def control_router(control: Control, trainer: TrainerLink, status: Status) -> APIRouter:
    """What people may change."""
    router = APIRouter(prefix="/v1", tags=["control"])

    @router.post("/pause", summary="Start no new rollouts; those that run end, and are used")
    async def pause(body: Reason | None = None) -> PauseStatus:
        return await control.pause(body.reason if body else "")

    @router.post("/resume", summary="Start rollouts again")
    async def resume() -> PauseStatus:
        return await control.resume()

    @router.patch("/settings", summary="Change the staleness bound, or how many tasks run at once")
    async def change_settings(body: SettingsChange) -> SettingsView:
        return await control.change(body)

    @router.post("/servers/{name}/drain", summary="Take an engine out of routing", responses=responses(404))
    async def drain(name: Server) -> list[ServerStatus]:
        await control.drain(name, True)
        return status.servers()

    @router.post("/servers/{name}/undrain", summary="Give an engine requests again", responses=responses(404))
    async def undrain(name: Server) -> list[ServerStatus]:
        await control.drain(name, False)
        return status.servers()

    _add_trainer(router, trainer)
    return router


def _add_trainer(router: APIRouter, trainer: TrainerLink) -> None:
    away = responses(400, 404, 503, 504)

    @router.post(
        "/checkpoints",
        status_code=201,
        summary="Ask for a checkpoint at the end of the running step",
        responses={**away, 202: {"model": CheckpointStatus, "description": "It will come"}},
    )
    async def save(
        response: Response,
        wait_s: Annotated[float, Query(ge=0, le=600, description="How long to wait for it.", examples=[30])] = 30.0,
    ) -> CheckpointStatus:
        status = await trainer.save(wait_s)
        response.status_code = 201 if status.state == "complete" else 202
        return status

    @router.post("/evaluations", status_code=202, summary="Begin a held-out evaluation beside training", responses=away)
    async def evaluate() -> EvaluationStarted:
        return await trainer.evaluate()

    @router.post("/stop", status_code=202, summary="End training after the running step", responses=away)
    async def stop(body: Reason | None = None) -> Stopping:
        return await trainer.stop(body.reason if body and body.reason else "asked for over REST")
