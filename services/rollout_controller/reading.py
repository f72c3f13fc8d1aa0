"""What people look up: versions and who serves them, tasks, and parts of the status by themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Query

from headway.core.ledger import TaskState
from headway.core.trajectory import Outcome
from services.rollout_controller.people_store import TaskFilter
from services.rollout_controller.problems import responses
from services.rollout_controller.status import ControllerStatus, ServerStatus, ServiceStatus, WaitStatus
from services.rollout_controller.task_pages import TaskPages
from services.rollout_controller.versions import VersionBook
from services.rollout_controller.views import TaskDetail, TaskPage, VersionDetail, VersionPage

MAX_PAGE = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
LABEL = r"^v[0-9]{1,15}\.[0-9]{1,15}$"
Version = Annotated[str, Path(pattern=LABEL, description="Its label.", examples=["v1.12"])]
Before = Annotated[str | None, Query(pattern=LABEL, description="`next` of the page before.", examples=["v1.12"])]
Cursor = Annotated[str | None, Query(max_length=200, description="`next` of the page before.")]


@dataclass(frozen=True)
class Records:
    """Where the answers come from."""

    status: Callable[[], ControllerStatus]
    versions: VersionBook
    tasks: TaskPages


def reading_router(records: Records) -> APIRouter:
    """The routes; whoever mounts them says who may call."""
    router = APIRouter(prefix="/v1", tags=["looking up"])

    @router.get("/services", summary="Services that are registered")
    async def get_services() -> list[ServiceStatus]:
        return records.status().services

    @router.get("/servers", summary="Engines, their state, and the version that each serves")
    async def get_servers() -> list[ServerStatus]:
        return records.status().servers

    @router.get("/waits", summary="What is waited for, oldest first")
    async def get_waits() -> list[WaitStatus]:
        return records.status().waits

    @router.get("/versions", summary="Published versions, newest first")
    async def get_versions(limit: Limit = 50, cursor: Before = None) -> VersionPage:
        return records.versions.page(cursor, limit)

    @router.get("/versions/{version}", summary="One version with its manifest", responses=responses(404))
    async def get_version(version: Version) -> VersionDetail:
        return records.versions.detail(version)

    @router.get("/tasks", summary="Tasks, in the order of their ids")
    async def get_tasks(
        state: TaskState | None = None,
        outcome: Outcome | None = None,
        search: Annotated[str, Query(max_length=200, description="A part of the id.")] = "",
        limit: Limit = 100,
        cursor: Cursor = None,
    ) -> TaskPage:
        return await records.tasks.page(TaskFilter(state, outcome, search), cursor or "", limit)

    @router.get("/tasks/{task_id:path}", summary="One task with what happened to it", responses=responses(404))
    async def get_task(task_id: str) -> TaskDetail:
        return await records.tasks.detail(task_id)

    return router
