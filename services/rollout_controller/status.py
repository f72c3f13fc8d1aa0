"""What the controller tells people and the launcher: the models of `/v1/status` and `/v1/report`, and their filling."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from headway.core.ledger import Failure, TaskState
from headway.core.trajectory import Outcome
from headway.runtime.waits import Wait
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.evaluations import EvaluationRecord
from services.rollout_controller.records import History, StepRecord

TOTAL_STEPS = "total_steps"
"""Under this name the trainer tells the length of the run with each step."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ServiceStatus(Model):
    """A service, as it is registered in name-resolve."""

    name: str = Field(description="Service and instance.", examples=["reward/0"])
    address: str = Field(
        description="Where it is called: `host:port`, or the URL of an engine.", examples=["10.0.0.7:7000"]
    )
    metadata: dict[str, str] = Field(description="What it says of itself, such as the address of its HTTP API.")


class ServerStatus(Model):
    """An inference server, as the controller sees it."""

    name: str = Field(description="Its instance in name-resolve.", examples=["0"])
    address: str = Field(description="URL of its engine.", examples=["http://10.0.0.8:30000"])
    state: str = Field(description="Whether requests are sent to it, and if not, why.", examples=["serving"])
    served_version: str | None = Field(description="The version that it reports; null: not known.", examples=["v1.12"])
    num_requests: int = Field(description="Requests that it works on for this controller.", examples=[64])
    tokens_in_flight: int = Field(default=0, description="Prompts and budgets of these requests.")
    since_s: float = Field(default=0.0, description="How long it has been in its state.")
    busy_s: float = Field(default=0.0, description="How long it has had a request since it joined.")
    joined_s: float = Field(default=0.0, description="How long ago it joined.")
    detail: str = Field(default="", description="The last failure, or what it is waited for.")


class FailureStatus(Model):
    """An attempt that came to nothing."""

    task_id: str = Field(examples=["0/17"])
    attempt: int = Field(examples=[1])
    outcome: str = Field(examples=["reward_timeout"])
    message: str = Field(examples=["RewardTimeout: math_verify ran past 15 s"])


class TaskStatus(Model):
    """Tasks by state. Their sum is `submitted`."""

    submitted: int
    pending: int = Field(description="Wait to be started.")
    running: int
    saving: int = Field(description="Finished, on their way to the disk.")
    ready: int = Field(description="Wait to be handed out.")
    leased: int = Field(description="Handed out; their step is not committed.")
    consumed: int = Field(description="Trained on.")
    rejected: int = Field(description="Ended by the workflow or by `should_accept_fn`.")
    quarantined: int = Field(description="Given up after three attempts.")
    is_conserved: bool = Field(description="Whether the states add up to `submitted`.")


class DiscardStatus(Model):
    """Attempts that did not end in a consumed group, of one reason."""

    count: int
    examples: list[FailureStatus] = Field(description="The last few.")


class StalenessStatus(Model):
    """The bound, and what it holds back."""

    policy: str
    eta: int = Field(
        description="How many steps old a token may be that is trained on (`rollout.max_head_offpolicyness`)."
    )
    batch_size: int = Field(description="Groups a step consumes (B).")
    served_step: int | None = Field(description="Newest step that the whole fleet has served; null: none yet.")
    outstanding: int = Field(description="Groups started and not yet trained on.")
    limit: int = Field(description="How many groups may be outstanding, (eta + 1) * B.")
    max_concurrent: int = Field(description="How many tasks may run at once.")
    capacity: int = Field(description="How many rollouts may start now.")
    holds_back: str = Field(description="Why no more rollouts are started now; empty: nothing holds them back.")


class WaitStatus(Model):
    """Something that is being waited for."""

    what: str = Field(examples=["32 ready groups for step 12"])
    since_s: float = Field(examples=[1.5])


class StepStatus(Model):
    """A train step, as the controller saw it."""

    step: int
    version: str | None = Field(description="The version that it made, `v1.13`; null: not committed.")
    is_skipped: bool = Field(description="It made no version (its gradient was not finite).")
    num_groups: int
    waited_s: float = Field(description="How long its batch was asked for and not ready.")
    tokens_by_staleness: dict[int, int] = Field(description="Gradient-carrying tokens by their staleness in steps.")
    masked_by_staleness: dict[int, int] = Field(description="Tokens that lost their gradient, by their staleness.")
    committed_at: float | None = Field(description="Unix seconds.")
    stats: dict[str, float] = Field(description="What the trainer said of the step.")


class StalenessHistogram(Model):
    """Tokens of all handed-out batches by their staleness in steps."""

    gradient: dict[int, int] = Field(description="Carried gradient.")
    masked: dict[int, int] = Field(description="Lost their gradient, being older than eta.")


class TimingStatus(Model):
    """Where the time of accepted groups went: means in seconds since the start of this process."""

    num_groups: int
    pending_s: float = Field(description="From submission to the start: the budget, free slots, servers.")
    rollout_s: float = Field(description="From the start to the end of the last sample.")
    generate_s: float = Field(description="Of it, in generation; mean over samples.")
    reward_s: float = Field(description="Of it, in rewards; mean over samples.")
    other_s: float = Field(
        description="Of it, neither: the workflow's own code, and samples that wait for the slowest of their group."
    )
    journal_s: float = Field(description="From the end until the group was on disk.")


class EvaluationStatus(Model):
    """A whole evaluation, pinned to one version."""

    version: str = Field(examples=["v1.10"])
    step: int = Field(description="Completed train steps that made the version.", examples=[10])
    reward: float | None = Field(description="Mean over samples; null: no sample ended in a reward.", examples=[0.5])
    num_samples: int = Field(examples=[64])
    num_failed: dict[str, int] = Field(description="Tasks without a reward, by reason.")


class ControllerStatus(Model):
    """Everything a person asks first."""

    run: str = Field(description="Experiment and trial.", examples=["gsm8k-grpo/trial0"])
    uptime_s: float
    published_version: str | None = Field(
        description="Newest version in name-resolve; null: none yet.", examples=["v1.12"]
    )
    services: list[ServiceStatus]
    servers: list[ServerStatus]
    tasks: TaskStatus
    discards: dict[str, DiscardStatus] = Field(description="By reason.")
    num_rollouts: dict[str, int] = Field(description="Rollouts of this process by how they ended.")
    quarantined: dict[str, list[FailureStatus]] = Field(description="The history of tasks that were given up.")
    staleness: StalenessStatus
    waits: list[WaitStatus] = Field(description="Oldest first.")
    last_step: StepStatus | None
    last_evaluation: EvaluationStatus | None = Field(description="The last one that has ended; null: none has.")
    num_steps: int = Field(description="Committed steps.")
    total_steps: int | None = Field(description="Steps of the whole run; null: no step is committed yet.")
    has_ended: bool = Field(description="Whether the last step of the run is committed.")
    waited_s: float = Field(description="How long all batches were asked for and not ready, those fetched ahead too.")
    requests_waiting: int = Field(description="Requests that no server may take now.")
    tokens: StalenessHistogram
    timing: TimingStatus


class ControllerReport(ControllerStatus):
    """The status, and the whole history."""

    history: list[StepStatus]
    evaluations: list[EvaluationStatus] = Field(description="Of the whole run, oldest first.")


class Status:
    """Fills the models from a controller.

    Args:
        run: Experiment and trial.
        controller: Whose status it is.
        surroundings: What is known of the other services.
    """

    def __init__(
        self, run: str, controller: RolloutController, surroundings: "Surroundings", started_at: float
    ) -> None:
        self.run = run
        self._controller = controller
        self._surroundings = surroundings
        self._started_at = started_at

    def status(self, now: float) -> ControllerStatus:
        controller, around = self._controller, self._surroundings
        last = controller.history.last_committed
        total = int(last.stats[TOTAL_STEPS]) if last is not None and TOTAL_STEPS in last.stats else None
        return ControllerStatus(
            run=self.run,
            uptime_s=now - self._started_at,
            published_version=around.published_version,
            services=around.services(),
            servers=around.servers(),
            tasks=task_status(controller),
            discards=discard_status(controller),
            num_rollouts={outcome.value: count for outcome, count in controller.production.num_outcomes.items()},
            quarantined={task: failures(history) for task, history in controller.ledger.quarantined.items()},
            staleness=staleness_status(controller),
            waits=[wait_status(wait) for wait in controller.waits.snapshot()],
            last_step=step_status(last) if last else None,
            last_evaluation=evaluation_status(controller.evaluations.history[-1])
            if controller.evaluations.history
            else None,
            num_steps=controller.history.num_committed,
            total_steps=total,
            has_ended=total is not None and last is not None and last.made_step >= total,
            waited_s=controller.history.waited_s,
            requests_waiting=around.requests_waiting(),
            tokens=histogram(controller.history),
            timing=timing_status(controller),
        )

    def servers(self) -> list[ServerStatus]:
        return self._surroundings.servers()

    async def report(self, now: float) -> ControllerReport:
        history = [step_status(record) for record in await self._controller.all_steps()]
        evaluations = [evaluation_status(record) for record in self._controller.evaluations.history]
        return ControllerReport(**dict(self.status(now)), history=history, evaluations=evaluations)


class Surroundings:
    """What is known of the other services; the app keeps it current."""

    published_version: str | None = None

    def services(self) -> list[ServiceStatus]:
        return []

    def servers(self) -> list[ServerStatus]:
        return []

    def requests_waiting(self) -> int:
        """Requests that no server may take now."""
        return 0


def task_status(controller: RolloutController) -> TaskStatus:
    counts = {state.value: controller.ledger.counts[state] for state in TaskState}
    submitted = controller.ledger.num_submitted
    return TaskStatus(submitted=submitted, is_conserved=submitted == sum(counts.values()), **counts)


def discard_status(controller: RolloutController) -> dict[str, DiscardStatus]:
    ledger = controller.ledger
    return {
        outcome.value: DiscardStatus(count=count, examples=failures(ledger.examples.get(outcome, [])))
        for outcome, count in ledger.num_discarded.items()
    }


def failures(history: Sequence[Failure]) -> list[FailureStatus]:
    return [
        FailureStatus(task_id=one.task_id, attempt=one.attempt, outcome=one.outcome.value, message=one.message)
        for one in history
    ]


def staleness_status(controller: RolloutController) -> StalenessStatus:
    budget, settings = controller.production.budget, controller.settings
    return StalenessStatus(
        policy=settings.policy.value,
        eta=settings.eta,
        batch_size=settings.batch_size,
        served_step=controller.served,
        outstanding=controller.ledger.num_outstanding,
        limit=budget.get_pending_limit(),
        max_concurrent=settings.max_concurrent,
        capacity=max(0, budget.get_capacity()),
        holds_back=holds_back(controller),
    )


def holds_back(controller: RolloutController) -> str:
    """Why no rollout is started now, in words."""
    budget, dispatcher = controller.production.budget, controller.production.dispatcher
    if controller.served is None:
        return "no server serves a published version yet"
    if dispatcher.is_paused:
        return "new starts are paused"
    if budget.staleness_capacity <= 0:
        out, limit = budget.num_outstanding, budget.get_pending_limit()
        return f"staleness: {out} groups are not yet trained on and served; the limit is {limit}"
    if budget.concurrency_capacity <= 0:
        return f"rollout.max_concurrent_rollouts: {budget.get_stats().running} tasks run"
    if not dispatcher.num_pending:
        return "no task is pending: the trainer has not submitted more"
    return ""


def wait_status(wait: Wait) -> WaitStatus:
    return WaitStatus(what=wait.what, since_s=wait.since_s)


def step_status(record: StepRecord) -> StepStatus:
    return StepStatus(
        step=record.step,
        version=record.version.label if record.version else None,
        is_skipped=record.is_skipped,
        num_groups=record.num_groups,
        waited_s=record.waited_s,
        tokens_by_staleness=record.tokens_by_staleness,
        masked_by_staleness=record.masked_by_staleness,
        committed_at=record.committed_at,
        stats=record.stats,
    )


def evaluation_status(record: EvaluationRecord) -> EvaluationStatus:
    return EvaluationStatus(
        version=record.version.label,
        step=record.version.step,
        reward=record.reward_sum / record.num_samples if record.num_samples else None,
        num_samples=record.num_samples,
        num_failed={outcome.value: count for outcome, count in record.num_failed.items()},
    )


def histogram(history: History) -> StalenessHistogram:
    return StalenessHistogram(
        gradient=dict(sorted(history.tokens_by_staleness.items())),
        masked=dict(sorted(history.masked_by_staleness.items())),
    )


def timing_status(controller: RolloutController) -> TimingStatus:
    timing = controller.production.timing
    num = max(1, timing.num)
    return TimingStatus(
        num_groups=timing.num,
        pending_s=timing.pending_s / num,
        rollout_s=timing.rollout_s / num,
        generate_s=timing.generate_s / num,
        reward_s=timing.reward_s / num,
        other_s=max(0.0, timing.rollout_s - timing.generate_s - timing.reward_s) / num,
        journal_s=timing.journal_s / num,
    )


__all__ = ["ControllerReport", "ControllerStatus", "Outcome", "ServerStatus", "ServiceStatus", "Status", "Surroundings"]
