"""The routes of sessions: open one from outside, give it a reward, end it and get its trajectories.

A session's key authenticates its calls; opening one needs the control token. What is made in a session that was opened
here is returned, and never trained on: it belongs to no task. A task's own session is ended by its workflow, which
trains on it.
"""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from headway.core.trajectory import Trajectory
from headway.gateway.gateway import DEFAULT_TIMEOUT_S, Access, Gateway
from headway.gateway.session import Session
from services.rollout_controller.auth import require_control
from services.rollout_controller.gateway_http import key_of
from services.rollout_controller.problems import responses

SESSION_KEY = HTTPBearer(scheme_name="session key", description="The `api_key` of the session.", auto_error=False)
Number = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class OpenSession(Body):
    """How to open a session."""

    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = DEFAULT_TIMEOUT_S
    """Seconds until it ends by itself."""


class OpenedSession(BaseModel):
    """What an agent needs."""

    id: str
    api_key: str
    openai_base_url: str
    anthropic_base_url: str


class GiveReward(Body):
    """A reward of the whole session, or of one answer."""

    reward: Number
    answer_id: Annotated[
        str | None, Field(description="The id of a completion or message; null: the whole session.")
    ] = None


class EndSession(Body):
    """The last word on a session."""

    reward: Annotated[Number | None, Field(description="Of the whole session; null: as it was given before, or 0.")] = (
        None
    )


class TokenSequence(BaseModel):
    """A trajectory: L tokens."""

    input_ids: list[int]
    logprobs: list[float] = Field(description="Of generated tokens under the policy that made them; else 0.")
    loss_mask: list[bool] = Field(description="True where the token was generated.")
    versions: list[int] = Field(description="Step of the version that made the token; else -1.")
    reward: float
    stop_reason: str


class SessionState(BaseModel):
    """What became of a session so far."""

    id: str
    end_reason: str = Field(description="Empty while it is open.")
    reward: float | None
    answer_ids: list[str]
    num_drifts: int = Field(description="Calls that did not continue what was said before, but edited it.")
    trajectories: list[TokenSequence]


def session_router(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/v1/sessions", tags=["agents"])
    api = SessionRoutes(gateway)
    opening = {"dependencies": [Depends(require_control)], "responses": responses(422, 429, 503)}
    owning = {"dependencies": [Depends(SESSION_KEY)], "responses": responses(401, 404, 410, 422)}
    router.add_api_route("", api.open, methods=["POST"], status_code=201, summary="Open a session", **opening)  # type: ignore[arg-type]
    router.add_api_route("/{id}", api.state, methods=["GET"], summary="A session so far", **owning)  # type: ignore[arg-type]
    router.add_api_route("/{id}/reward", api.reward, methods=["POST"], summary="Give a reward", **owning)  # type: ignore[arg-type]
    router.add_api_route("/{id}/end", api.end, methods=["POST"], summary="End a session", **owning)  # type: ignore[arg-type]
    return router


class SessionRoutes:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def open(self, request: Request, body: OpenSession | None = None) -> OpenedSession:
        session = self._gateway.open_outside((body or OpenSession()).timeout_s)
        access = Access(str(request.base_url).rstrip("/"), session.id, session.key)
        return OpenedSession(
            id=session.id,
            api_key=session.key,
            openai_base_url=access.openai_url,
            anthropic_base_url=access.anthropic_url,
        )

    async def state(self, id: str, request: Request) -> SessionState:
        session = self._owned(id, request)
        return state_of(session, session.trajectories(session.reward or 0.0))

    async def reward(self, id: str, body: GiveReward, request: Request) -> dict[str, float]:
        self._owned(id, request).give_reward(body.reward, body.answer_id)
        return {"reward": body.reward}

    async def end(self, id: str, request: Request, body: EndSession | None = None) -> SessionState:
        session, body = self._owned(id, request), body or EndSession()
        if body.reward is not None:
            session.give_reward(body.reward)
        self._gateway.sessions.end(session, "its agent ended it")
        return state_of(session, session.trajectories(session.reward or 0.0))

    def _owned(self, id: str, request: Request) -> Session:
        return self._gateway.sessions.find(key_of(request), id)


def state_of(session: Session, trajectories: list[Trajectory]) -> SessionState:
    """What people see of a session."""
    return SessionState(
        id=session.id,
        end_reason=session.end_reason,
        reward=session.reward,
        answer_ids=list(session.transcript.turns),
        num_drifts=session.num_drifts,
        trajectories=[_sequence(trajectory) for trajectory in trajectories],
    )


def _sequence(trajectory: Trajectory) -> TokenSequence:
    return TokenSequence(
        input_ids=trajectory.input_ids.tolist(),
        logprobs=trajectory.logprobs.tolist(),
        loss_mask=trajectory.loss_mask.tolist(),
        versions=trajectory.versions.tolist(),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
    )
