"""The trainer's metrics for Prometheus: what it does, where its time went, and the numbers of its last step."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from headway.runtime.metrics import Value, families
from headway.runtime.metrics_table import DIVERGENCES
from services.trainer.grpc_api import TrainerView
from services.trainer.phases import Phases

UPDATE = "ppo_actor/update"
STATISTICS = {
    "headway_trainer_reward": "ppo_actor/task_reward/avg",
    "headway_trainer_held_out_reward": "eval/task_reward/avg",
    "headway_trainer_loss": f"{UPDATE}/actor_loss/avg",
    "headway_trainer_grad_norm": f"{UPDATE}/grad_norm",
    "headway_trainer_entropy": f"{UPDATE}/entropy/avg",
    "headway_trainer_clip_ratio": f"{UPDATE}/clip_ratio/avg",
    "headway_trainer_effective_sample_size": f"{UPDATE}/effective_sample_size",
    "headway_trainer_staleness": "rollout/staleness/avg",
    "headway_trainer_completion_tokens": "ppo_actor/completion_len/avg",
    "headway_trainer_samples_per_second": "throughput/samples_per_s",
    "headway_trainer_tokens_per_second": "throughput/tokens_per_s",
}
"""Names of the statistics that are shown, by the metrics that show them; NaN until there is one."""
NAN = float("nan")


def trainer_metrics(view: TrainerView) -> Iterable[Metric]:
    """The metrics of this moment."""
    last = view.statistics.last if view.statistics else {}
    return families(_progress(view) | _phases(view.phases) | _statistics(last))


def _progress(view: TrainerView) -> dict[str, Value]:
    loop = view.loop
    return {
        "headway_trainer_step": loop.progress.version.step if loop else -1,
        "headway_trainer_total_steps": loop.total_steps if loop else 0,
        "headway_trainer_samples_total": loop.progress.num_samples if loop else 0,
        "headway_trainer_skipped_steps_total": loop.progress.num_skipped if loop else 0,
    }


def _phases(phases: Phases) -> dict[str, Value]:
    return {
        "headway_trainer_phase": {phases.current.value: 1.0},
        "headway_trainer_phase_seconds_total": phases.total_seconds(),
    }


def _statistics(last: Mapping[str, float]) -> dict[str, Value]:
    shown: dict[str, Value] = {metric: last.get(name, NAN) for metric, name in STATISTICS.items()}
    divergences = {name: last.get(f"{UPDATE}/divergence/{name}/avg", NAN) for name in DIVERGENCES}
    return shown | {"headway_trainer_divergence": divergences}
