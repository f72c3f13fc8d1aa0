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

import importlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import orjson
from numpy.typing import NDArray

from headway.config import ExperimentConfig, plain
from headway.core.trajectory import Group, Outcome
from headway.core.version import PolicyVersion
from services.trainer.controller_client import EvaluatedTask, FetchedBatch

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
    return stats | _staleness_stats(token_staleness(batch.groups, batch.step), eta) | _sample_metrics(batch.groups)


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


class Sink(Protocol):
    """Somewhere that records go."""

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Let nothing be lost."""


class StatsLogger:
    """Writes records to every configured sink.

    Args:
        config: Says which sinks there are.
        total_steps: Shown on the console.
        step: Completed steps at the start; later records of an earlier life of the run are replaced.
    """

    def __init__(self, config: ExperimentConfig, total_steps: int, step: int) -> None:
        self._total_steps = total_steps
        self._sinks: dict[str, Sink] = {}
        for name, make in _sinks(config, step):
            self._attempt(name, partial(self._add, name, make))
        self._last_step = step if step > 0 else -1
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


class JsonlSink:
    """One JSON object a line; lines of steps after `step` are dropped at the start."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, step) if step > 0 and path.exists() else []
        aside = path.with_suffix(".new")
        aside.write_bytes(b"".join(kept))
        aside.replace(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(dict(record)).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Event files."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(path), purge_step=step + 1)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float) and name != "time":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandBSink:
    """Weights & Biases; `offline` needs no network, `online` falls back to it when the server cannot be reached."""

    def __init__(self, config: ExperimentConfig) -> None:
        wandb = importlib.import_module("wandb")
        settings = config.stats_logger.wandb
        if key := settings.key():
            wandb.login(key=key, host=settings.wandb_base_url)
        name = settings.name or config.trial_name
        self._run: Any = wandb.init(
            mode=settings.mode,
            project=settings.project or config.experiment_name,
            entity=settings.entity,
            name=name,
            id=f"{config.experiment_name}_{config.trial_name}_{settings.id_suffix}",
            resume="allow",
            job_type=settings.job_type,
            group=settings.group or config.run_name,
            notes=settings.notes,
            tags=settings.tags,
            dir=str(config.paths.logs),
            config=settings.config or plain(config),
        )

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLabSink:
    """SwanLab."""

    def __init__(self, config: ExperimentConfig) -> None:
        swanlab = importlib.import_module("swanlab")
        settings = config.stats_logger.swanlab
        if key := settings.key():
            swanlab.login(api_key=key)
        self._run: Any = swanlab.init(
            mode=settings.mode,
            project=settings.project or config.experiment_name,
            experiment_name=settings.name or config.trial_name,
            logdir=settings.logdir or str(config.paths.logs / "swanlab"),
            config=settings.config or plain(config),
        )

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in record.items() if isinstance(value, float)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _sinks(config: ExperimentConfig, step: int) -> list[tuple[str, Callable[[], Sink]]]:
    logger = config.stats_logger
    sinks: list[tuple[str, Callable[[], Sink]]] = []
    sinks.append(("stats.jsonl", lambda: JsonlSink(config.paths.logs / "stats.jsonl", step)))
    if (path := logger.tensorboard.path) is not None:
        sinks.append(("TensorBoard", lambda: TensorBoardSink(Path(path), step)))
    if logger.wandb.mode != "disabled":
        sinks.append(("W&B", lambda: WandBSink(config)))
    if logger.swanlab.mode not in (None, "disabled"):
        sinks.append(("SwanLab", lambda: SwanLabSink(config)))
    return sinks


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The whole lines of a file whose step is not after `step`; a torn last line is dropped."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or orjson.loads(line)["step"] > step:
            break
        kept.append(line)
    return kept


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
