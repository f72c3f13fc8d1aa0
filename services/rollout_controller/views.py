"""The models of the REST API beside the status: versions, tasks, metrics, timeline, trainer, control.

Times called `..._at`, `begin` and `end` are Unix seconds; those called `..._s` are durations in seconds. A page says in
`next` where to go on: the value of `cursor` in the next call; null: this was the last page.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from services.rollout_controller.status import EvaluationStatus, FailureStatus, Model, WaitStatus


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


MAX_NUMBER = 1_000_000
FromZero = Annotated[int, Field(ge=0, le=MAX_NUMBER), BeforeValidator(_no_bool)]
FromOne = Annotated[int, Field(ge=1, le=MAX_NUMBER), BeforeValidator(_no_bool)]
"""Whole numbers; `true` is none."""
LaneKind = Literal["engine", "trainer", "evaluation", "wait"]


class Span(Model):
    """A lane was in one state for a while."""

    state: str = Field(
        description="Of an engine: `busy`, `idle`, `updating`, `joining`, `lost`, `leaving`. Of the trainer: its "
        "phase, such as `wait_for_batch`, `update`, `publish`. Of an evaluation: `running`. Of a wait: `waiting`.",
        examples=["busy"],
    )
    detail: str = Field(default="", description="What is waited for, updated to, or wrong.", examples=["v1.12"])
    begin: float = Field(examples=[1767225600.25])
    end: float | None = Field(description="null: it goes on.", examples=[1767225604.5])


class Lane(Model):
    """What one thing did, oldest first."""

    name: str = Field(description="`engine/0`, `trainer`, `evaluation`, `controller`.", examples=["engine/0"])
    kind: LaneKind = Field(description="Spans of an evaluation and of waits may overlap.")
    spans: list[Span]


class TimelineView(Model):
    """What engines and the trainer did lately."""

    now: float = Field(description="Unix seconds of this answer.", examples=[1767225605.0])
    lanes: list[Lane] = Field(description="Engines, then the trainer, evaluations, and what the controller waited for.")


class MoveStatus(Model):
    """How the fleet was moved to a version."""

    num_moved: int = Field(description="Servers that serve it.", examples=[4])
    num_out: int = Field(description="Servers that did not make it.", examples=[0])
    prepare_s: float = Field(description="Longest preparation of a server; its requests went on.", examples=[1.9])
    pause_s: float = Field(description="Longest time for which no request of a server advanced.", examples=[0.21])
    load_s: float = Field(description="Of the pauses, the longest time in loading and verifying.", examples=[0.18])
    total_s: float = Field(description="From the news of the version until the last server settled.", examples=[2.3])


class FileStatus(Model):
    """A file of a version."""

    name: str = Field(examples=["model-00001-of-00002.safetensors"])
    num_bytes: int = Field(examples=[4294967296])
    sha256: str = Field(examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])


class VersionStatus(Model):
    """A published version."""

    version: str = Field(examples=["v1.12"])
    step: int = Field(description="Completed train steps that made it.", examples=[12])
    published_at: float = Field(examples=[1767225600.0])
    manifest_sha256: str = Field(description="Of its manifest file.")
    parent: str | None = Field(description="The version that it was trained from; null: none, or not known.")
    num_files: int | None = Field(description="null: its folder is gone, or was not seen yet.", examples=[2])
    num_bytes: int | None = Field(examples=[8589934592])
    served_by: list[str] = Field(description="Names of the engines that serve it now.", examples=[["0", "1"]])
    fleet_update: MoveStatus | None = Field(description="null: not moved yet, or by an earlier life of this process.")


class VersionPage(Model):
    """Published versions, newest first; as far as this process and the weights' folder know of them."""

    versions: list[VersionStatus]
    next: str | None = Field(examples=["v1.3"])


class VersionDetail(VersionStatus):
    """A version with its manifest."""

    files: list[FileStatus]


class TaskSummary(Model):
    """A task."""

    task_id: str = Field(examples=["0/17"])
    state: str = Field(
        description="`pending`, `running`, `saving`, `ready`, `leased`, `consumed`, `rejected` or `quarantined`.",
        examples=["consumed"],
    )
    num_attempts: int = Field(description="How often it was started; 0: not yet, or no longer known.", examples=[1])
    outcome: str | None = Field(
        description="How its last attempt ended; null: none has, or no longer known.", examples=["accepted"]
    )
    step: int | None = Field(description="The train step that consumes or consumed its group.", examples=[12])
    detail: str = Field(default="", description="Why its last failure failed.")


class TaskPage(Model):
    """Tasks, in the order of their ids as text."""

    tasks: list[TaskSummary]
    next: str | None = Field(examples=["0/17"])


class TaskDetail(TaskSummary):
    """A task with what happened to it."""

    started_step: int | None = Field(description="The step that the fleet served when it was last started.")
    tokens_by_version: dict[int, int] = Field(
        description="Gradient-carrying tokens of its group by the step of the version that made them."
    )
    failures: list[FailureStatus] = Field(description="Attempts that came to nothing, oldest first.")


class Series(Model):
    """One number over the steps."""

    name: str = Field(examples=["ppo_actor/task_reward/avg"])
    points: list[tuple[int, float]] = Field(
        description="Pairs of completed steps and value, in order.", examples=[[[11, 0.40625], [12, 0.4375]]]
    )


class MetricsHistory(Model):
    """Numbers over the steps."""

    names: list[str] = Field(description="Every name that there is, whether asked for or not.")
    series: list[Series]
    next_step: int | None = Field(description="`since_step` of the next call; null: these were the last steps.")


class EvaluationRun(Model):
    """An evaluation that runs, pinned to one version."""

    version: str = Field(examples=["v1.12"])
    step: int = Field(examples=[12])
    num_tasks: int = Field(examples=[64])
    num_done: int = Field(examples=[40])
    since_s: float


class EvaluationResult(EvaluationStatus):
    """The same, with its times."""

    began_at: float
    ended_at: float


class Evaluations(Model):
    """Evaluations that run, and those that have ended, oldest first."""

    running: list[EvaluationRun]
    ended: list[EvaluationResult]


class TrainerView(Model):
    """The leading trainer, as it last answered."""

    name: str = Field(description="Its instance in name-resolve.", examples=["0"])
    phase: str = Field(examples=["update"])
    phase_s: float = Field(description="How long it is in this phase.")
    progress: float | None = Field(description="Part of the phase that is done; null: not known.")
    version: str | None = Field(description="Of the weights in hand.", examples=["v1.12"])
    total_steps: int | None
    waits: list[WaitStatus] = Field(description="Oldest first.")
    answered_s: float = Field(description="How long ago it answered.")


class SettingsView(Model):
    """What can be changed while the run goes on."""

    max_head_offpolicyness: int = Field(examples=[2])
    max_concurrent_rollouts: int = Field(examples=[64])
    file: dict[str, int] = Field(description="What the experiment file says of those that were changed.")


class SettingsChange(Model):
    """Those to change; the others stay."""

    max_head_offpolicyness: FromZero | None = Field(
        default=None, description="Holds from the next batch on.", examples=[2]
    )
    max_concurrent_rollouts: FromOne | None = Field(
        default=None, description="What runs beyond it may end.", examples=[64]
    )


class PauseStatus(Model):
    """Whether new rollouts are held back by a person."""

    is_paused: bool
    reason: str = Field(examples=["maintenance of the reward cluster"])
    since_s: float | None = Field(description="How long; null: it is not paused.")


class Reason(Model):
    """Why; shown to others."""

    reason: str = Field(default="", max_length=500, examples=["maintenance of the reward cluster"])


class CheckpointStatus(Model):
    """A checkpoint that was asked for."""

    state: Literal["complete", "requested"] = Field(description="`requested`: it comes at the end of the running step.")
    version: str | None = Field(examples=["v1.12"])
    path: str | None = Field(description="Its folder, as the trainer sees it.")


class EvaluationStarted(Model):
    """An evaluation that runs now; its result is in `GET /v1/evaluations`."""

    version: str = Field(examples=["v1.12"])


class Stopping(Model):
    """The trainer ends after the running step."""

    reason: str
