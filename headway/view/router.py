"""`/v1/groups` and `/v1/trajectories`. Handlers are plain functions: they read files, in threads beside the loop."""

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query

from headway.view.groups import Filters, Order
from headway.view.models import GroupPage, Kind, Sort, TaskGroups, Trajectory
from headway.view.store import Store
from headway.view.trajectories import Address

MAX_PAGE = 500
Number = Annotated[float | None, Query(allow_inf_nan=False)]
Step = Annotated[int | None, Query(ge=0, lt=1 << 62)]


def says(status: int) -> dict[int | str, dict[str, Any]]:
    """That a route may answer with an error."""
    return {status: {"description": HTTPStatus(status).phrase}}


def trajectories_router(store: Store) -> APIRouter:
    """The routes over one run's trajectories."""
    router = APIRouter(prefix="/v1", tags=["trajectories"])

    @router.get("/groups", summary="Groups of samples: filtered, sorted, by pages", responses=says(400))
    def get_groups(
        kind: Annotated[Kind | None, Query(description="For training, or for evaluations.")] = None,
        outcome: Annotated[str | None, Query(description="`accepted` or `rejected`.")] = None,
        search: Annotated[
            str | None, Query(max_length=200, description="In the prompt, or the beginning of a task's id.")
        ] = None,
        min_reward: Number = None,
        max_reward: Number = None,
        min_length: Number = None,
        max_length: Number = None,
        min_staleness: Step = None,
        max_staleness: Step = None,
        min_step: Step = None,
        max_step: Step = None,
        sort: Sort = "step",
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
        cursor: Annotated[str | None, Query(max_length=400, description="`next` of the page before.")] = None,
    ) -> GroupPage:
        filters = Filters(
            kind,
            outcome,
            search,
            min_reward,
            max_reward,
            min_length,
            max_length,
            min_staleness,
            max_staleness,
            min_step,
            max_step,
        )
        return store.groups(filters, Order(sort, order == "asc"), limit, cursor)

    @router.get("/groups/{task_id:path}", summary="Every group of a task, with its samples", responses=says(404))
    def get_task(task_id: str) -> TaskGroups:
        return store.task(task_id)

    @router.get("/trajectories/{task_id:path}/{sample}", summary="One sample with its tokens", responses=says(404))
    def get_trajectory(
        task_id: str,
        sample: Annotated[int, Path(ge=0, lt=1 << 62)],
        kind: Kind | None = None,
        step: Step = None,
        attempt: Step = None,
    ) -> Trajectory:
        return store.trajectory(Address(task_id, sample, kind, step, attempt))

    return router
