"""What each episode did and when: a line of JSON a session, as `perf_tracer.session_tracer` and
`rollout.enable_rollout_tracing` ask for.

    group begins -> [episode: generate, reward, generate, ...] x samples -> group ends -> one line an episode

A phase is one call of the engine or of the reward function; what lies between is the workflow's own time. Every
episode that began leaves a line, also when it failed or was cancelled.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headway.core.trajectory import Outcome
from headway.runtime.tracing import span
from headway.workflow.api import EpisodeResult, InferenceEngine, RolloutWorkflow

FILE = "sessions.jsonl"


@dataclass(slots=True)
class Session:
    """One episode. Seconds of the event loop's clock."""

    began_at: float
    ended_at: float = 0.0
    status: str = "cancelled"
    """`finished`, `failed` or `cancelled`: of the episode itself, whatever became of its group."""
    error: str = ""
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, beginning, end."""


@dataclass(frozen=True, slots=True)
class GroupSessions:
    """The episodes of one attempt at a task."""

    kind: str
    """`train` or `evaluation`."""
    task_id: str
    attempt: int
    outcome: Outcome
    sessions: Sequence[Session]


_sessions: ContextVar[list[Session] | None] = ContextVar("sessions", default=None)
_session: ContextVar[Session | None] = ContextVar("session", default=None)


def collect_sessions() -> list[Session]:
    """The list that the episodes of the running group enter from now on."""
    sessions: list[Session] = []
    _sessions.set(sessions)
    return sessions


def note_phase(name: str, began_at: float, ended_at: float) -> None:
    """A call of the running episode has ended."""
    session = _session.get()
    if session is not None:
        session.phases.append((name, began_at, ended_at))


class RecordedWorkflow(RolloutWorkflow):
    """A workflow whose episodes are noted."""

    def __init__(self, workflow: RolloutWorkflow) -> None:
        self._workflow = workflow

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        clock = asyncio.get_running_loop().time
        session = Session(clock())
        _session.set(session)
        sessions = _sessions.get()
        if sessions is not None:
            sessions.append(session)
        try:
            with span("episode"):
                result = await self._workflow.arun_episode(engine, data)
            session.status = "finished"
            return result
        except Exception as error:  # noted, and raised again
            session.status, session.error = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            session.ended_at = clock()


class SessionLines:
    """Encodes sessions.

    Args:
        folder: Where the file is.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._unix_s = time.time() - asyncio.get_running_loop().time()

    def encode(self, groups: Sequence[GroupSessions]) -> Mapping[Path, bytes]:
        """The lines of these groups."""
        records = [
            self._record(group, number, session) for group in groups for number, session in enumerate(group.sessions)
        ]
        return {self._path: b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)}

    def _record(self, group: GroupSessions, number: int, session: Session) -> dict[str, Any]:
        times = {name: _union_s(session, name) for name in ("generate", "reward")}
        total_s = session.ended_at - session.began_at
        return {
            "task_id": group.task_id,
            "sample": number,
            "attempt": group.attempt,
            "kind": group.kind,
            "outcome": group.outcome,
            "status": session.status,
            "error": session.error,
            "began_at": self._unix_s + session.began_at,
            "total_s": total_s,
            "generate_s": times["generate"],
            "reward_s": times["reward"],
            "other_s": total_s - _union_s(session),
            "phases": [
                {"name": name, "start_s": began - session.began_at, "end_s": ended - session.began_at}
                for name, began, ended in session.phases
            ],
        }


def _union_s(session: Session, name: str = "") -> float:
    """Time in which a call of this name ran, of any name where there is none; calls at the same time count once."""
    total, until = 0.0, session.began_at
    for _, began, ended in sorted((phase for phase in session.phases if name in ("", phase[0])), key=lambda p: p[1]):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
