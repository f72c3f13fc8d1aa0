"""The fleet as people see it, and what became of a move."""

from dataclasses import dataclass

from headway.core.version import PolicyVersion
from services.rollout_controller.fleet_member import EngineState, UpdateTimes


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One server."""

    name: str
    address: str
    engine: str
    version: str | None
    """The version that it was verified to serve."""
    state: EngineState
    tokens_in_flight: int
    """Prompts and budgets of the requests that it holds."""
    requests_running: int
    busy_s: float
    """How long it has had a request since it joined."""
    joined_s: float
    """How long ago it joined."""
    last_error: str
    since_s: float
    """How long it has been in its state."""
    last_update: UpdateTimes | None
    is_drained: bool
    """People took it out of routing."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All servers."""

    target: str | None
    """The newest published version."""
    served_step: int | None
    requests_waiting: int
    """Requests that no server may take now."""
    engines: list[EngineStatus]


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How a move of the fleet ended."""

    version: PolicyVersion
    num_moved: int
    num_out: int
    """Servers that did not make it and are taken out."""
    prepare_s: float
    """Longest preparation of a server."""
    pause_s: float
    """Longest pause of a server."""
    load_s: float
    """Longest load of a paused server."""
    total_s: float
