"""Numbers of each train step: what they are called, and where they go.

    ppo_actor/...            the algorithm's, under AReaL's names
    rollout/staleness/...    of the tokens that carry gradient: avg, max, and the fraction that is k versions old
    rollout/...              tokens, samples, replayed or not
    timing/PHASE             seconds in each phase since the last record
    throughput/...           samples and tokens a second
    eval/...                 held-out reward and what failed, in the steps where it was evaluated

Each record is written to the console (one line), to `stats.jsonl`, and to TensorBoard, W&B and SwanLab where these are
configured. Steps grow from record to record, over restarts too. A sink that fails is named once and left out: no
statistics end a run.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.config import ExperimentConfig
from headway.core.trajectory import Group, Outcome
from headway.core.version import PolicyVersion
from services.trainer.controller_client import EvaluatedTask, FetchedBatch
from services.trainer.sinks import Sink, sinks_of

Stats = dict[str, float]
log = logging.getLogger(__name__)


def batch_stats(batch: FetchedBatch, eta: int) -> Stats:
    """Numbers of what a step consumes: staleness of the tokens that carry gradient, counts, rewards, sample metrics."""
    samples = [sample for group in batch.groups for sample in group.trajectories]
    generated = sum(int((sample.versions >= 0).sum()) for sample in samples)
    lengths = [len(sample) for sample in samples]
    stats = {
        "rollout/samples": float(len(samples)),
        "rollout/groups": float(len(batch.groups)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/generated_tokens": float(generated),
        "rollout/masked_tokens": float(batch.num_masked_tokens),
        "rollout/seq_len/avg": float(np.mean(lengths)),
        "rollout/seconds/avg": float(np.mean([group.rollout_s for group in batch.groups])),
        "rollout/waited_s": batch.waited_s,
        "rollout/is_replay": float(batch.is_replay),
        "ppo_actor/task_reward/avg": float(np.mean([sample.reward for sample in samples])),
        "ppo_actor/task_reward/std": float(np.std([sample.reward for sample in samples])),
    }
    if shares := [len({sample.reward for sample in group.trajectories}) == 1 for group in several(batch.groups)]:
        stats["rollout/equal_groups"] = float(np.mean(shares))
    return stats | _staleness_stats(token_staleness(batch.groups, batch.step), eta) | _sample_metrics(batch.groups)


def several(groups: Sequence[Group]) -> list[Group]:
    """Those of more than one sample, whose rewards can differ."""
    return [group for group in groups if len(group.trajectories) > 1]


def token_staleness(groups: Sequence[Group], step: int) -> NDArray[np.int64]:
    """[gradient-carrying tokens] how many versions old each is when `step` consumes it."""
    parts = [step - sample.versions[sample.loss_mask] for group in groups for sample in group.trajectories]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _staleness_stats(staleness: NDArray[np.int64], eta: int) -> Stats:
    if not len(staleness):
        return {"rollout/staleness/avg": 0.0, "rollout/staleness/max": 0.0}
    stats = {"rollout/staleness/avg": float(staleness.mean()), "rollout/staleness/max": float(staleness.max())}
    counts = np.bincount(staleness, minlength=eta + 1)
    return stats | {f"rollout/staleness/fraction_{age}": float(n / len(staleness)) for age, n in enumerate(counts)}


def _sample_metrics(groups: Sequence[Group]) -> Stats:
    values: dict[str, list[float]] = {}
    for group in groups:
        for sample in group.trajectories:
            for name, value in sample.metrics.items():
                values.setdefault(name, []).append(value)
    return {f"rollout/{name}/avg": float(np.mean(found)) for name, found in values.items()}


def evaluation_stats(results: Sequence[EvaluatedTask]) -> Stats:
    """Held-out reward over the samples that ended in one; failures are counted, never taken for a reward of 0."""
    samples = [sample for result in results if result.group for sample in result.group.trajectories]
    failed = [result for result in results if result.outcome is not Outcome.ACCEPTED]
    stats = {"eval/rows": float(len(results)), "eval/failed": float(len(failed)), "eval/samples": float(len(samples))}
    for outcome in sorted({result.outcome for result in failed}):
        stats[f"eval/failed/{outcome}"] = float(sum(result.outcome is outcome for result in failed))
    if samples:
        rewards = [sample.reward for sample in samples]
        stats["eval/task_reward/avg"] = float(np.mean(rewards))
        stats["eval/task_reward/std"] = float(np.std(rewards))
        stats["eval/seq_len/avg"] = float(np.mean([len(sample) for sample in samples]))
    return stats


def timing_stats(seconds: Mapping[str, float], num_samples: float, num_tokens: float) -> Stats:
    """Seconds by phase, and what they make of throughput."""
    total = sum(seconds.values())
    stats = {f"timing/{phase}": value for phase, value in seconds.items()}
    stats["timing/step"] = total
    if total > 0:
        stats["throughput/samples_per_s"] = num_samples / total
        stats["throughput/tokens_per_s"] = num_tokens / total
    return stats


class StatsLogger:
    """Writes records to every configured sink.

    Args:
        config: Says which sinks there are.
        total_steps: Shown on the console.
        step: Of the last record of an earlier life of the run that stays; later ones are replaced. -1: none stays.
    """

    def __init__(self, config: ExperimentConfig, total_steps: int, step: int) -> None:
        self._total_steps = total_steps
        self._sinks: dict[str, Sink] = {}
        for name, make in sinks_of(config, step):
            self._attempt(name, partial(self._add, name, make))
        self._last_step = step
        self.last: Stats = {}

    def write(self, step: int, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        """Record the numbers of the weights that `step` completed steps made."""
        if step <= self._last_step:
            log.warning("statistics of step %d came again; the first ones stay", step)
            return
        self._last_step = step
        finite = {name: float(value) for name, value in sorted(stats.items()) if math.isfinite(value)}
        self.last = self.last | finite
        log.info("%s", console_line(step, self._total_steps, finite))
        record = {"step": step, "version": version.label, "time": time.time(), **finite}
        for name, sink in list(self._sinks.items()):
            if not self._attempt(name, partial(sink.write, step, record)):
                self._attempt(name, self._sinks.pop(name).close)

    def close(self) -> None:
        for name, sink in self._sinks.items():
            self._attempt(name, sink.close)

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        self._sinks[name] = make()

    def _attempt(self, name: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a broken sink is somebody else's code, and must not end training
            log.warning("statistics no longer go to %s: %s: %s", name, type(error).__name__, error)
            return False
        return True


def console_line(step: int, total_steps: int, stats: Mapping[str, float]) -> str:
    """One line for people.

    Example:
        >>> console_line(3, 10, {"ppo_actor/task_reward/avg": 0.5, "timing/step": 2.0, "eval/task_reward/avg": 0.25})
        'step 3/10 reward 0.500 held-out 0.250 2.00 s'
    """
    shown = [
        ("reward {:.3f}", "ppo_actor/task_reward/avg"),
        ("loss {:.4f}", "ppo_actor/update/actor_loss/avg"),
        ("grad {:.3f}", "ppo_actor/update/grad_norm"),
        ("entropy {:.3f}", "ppo_actor/update/entropy/avg"),
        ("staleness {:.2f}", "rollout/staleness/avg"),
        ("max {:.0f}", "rollout/staleness/max"),
        ("held-out {:.3f}", "eval/task_reward/avg"),
        ("{:.2f} s", "timing/step"),
        ("{:.0f} samples/s", "throughput/samples_per_s"),
    ]
    parts = [form.format(stats[name]) for form, name in shown if name in stats]
    return " ".join([f"step {step}/{total_steps}", *parts])
