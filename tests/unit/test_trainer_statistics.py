"""Statistics count what was trained on; their steps grow, over restarts too; a broken sink ends no run."""

import sys
import types
from pathlib import Path

import numpy as np
import orjson
import pytest

from headway.config import ExperimentConfig
from headway.core.trajectory import Outcome
from headway.core.version import PolicyVersion
from headway.testing.scripted_controller import random_group
from services.trainer import sinks
from services.trainer.controller_client import EvaluatedTask, FetchedBatch
from services.trainer.statistics import StatsLogger, batch_stats, evaluation_stats, timing_stats


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    return ExperimentConfig.model_validate({"cluster": {"fileroot": str(tmp_path)}})


def records(config: ExperimentConfig) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in (config.paths.logs / "stats.jsonl").read_bytes().splitlines()]


def test_the_staleness_histogram_covers_gradient_carrying_tokens() -> None:
    groups = (random_group("0/1", 5), random_group("0/2", 3))
    stats = batch_stats(FetchedBatch(5, groups, False, 0.25, 7, 2), eta=2)
    new, old = (sum(int(sample.loss_mask.sum()) for sample in group.trajectories) for group in groups)
    assert stats["rollout/staleness/max"] == 2
    assert stats["rollout/staleness/fraction_0"] == pytest.approx(new / (new + old))
    assert stats["rollout/staleness/fraction_1"] == 0
    assert stats["rollout/staleness/fraction_2"] == pytest.approx(old / (new + old))
    assert stats["rollout/masked_tokens"] == 7
    rewards = [sample.reward for group in groups for sample in group.trajectories]
    assert stats["ppo_actor/task_reward/avg"] == pytest.approx(np.mean(rewards))


def test_a_failed_evaluation_row_is_counted_and_is_no_reward_of_zero() -> None:
    group = random_group("0/1", 0)
    failed = EvaluatedTask("0/2", Outcome.REWARD_TIMEOUT, "15 s", None)
    stats = evaluation_stats([EvaluatedTask("0/1", Outcome.ACCEPTED, "", group), failed])
    assert stats["eval/task_reward/avg"] == pytest.approx(np.mean([sample.reward for sample in group.trajectories]))
    assert (stats["eval/failed"], stats["eval/failed/reward_timeout"]) == (1, 1)
    assert "eval/task_reward/avg" not in evaluation_stats([failed])


def test_throughput_counts_all_phases_of_the_step() -> None:
    stats = timing_stats({"wait_for_batch": 1.0, "update": 3.0}, num_samples=8, num_tokens=100)
    assert stats == {
        "timing/wait_for_batch": 1.0,
        "timing/update": 3.0,
        "timing/step": 4.0,
        "throughput/samples_per_s": 2.0,
        "throughput/tokens_per_s": 25.0,
    }


def test_steps_grow_from_record_to_record_and_nothing_infinite_is_written(config: ExperimentConfig) -> None:
    logger = StatsLogger(config, total_steps=9, step=-1)
    logger.write(0, PolicyVersion(1, 0), {"eval/task_reward/avg": 0.25})
    logger.write(1, PolicyVersion(1, 1), {"loss": 1.0, "broken": float("nan")})
    logger.write(1, PolicyVersion(1, 1), {"loss": 2.0})
    logger.close()
    written = records(config)
    assert [(record["step"], record["version"]) for record in written] == [(0, "v1.0"), (1, "v1.1")]
    assert written[1]["loss"] == 1.0
    assert "broken" not in written[1]
    assert logger.last["eval/task_reward/avg"] == 0.25


def test_a_recovered_run_continues_its_file_where_its_checkpoint_is(config: ExperimentConfig) -> None:
    first = StatsLogger(config, total_steps=9, step=-1)
    for step in range(1, 6):
        first.write(step, PolicyVersion(1, step), {"loss": 0.0})
    first.close()
    path = config.paths.logs / "stats.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 6, "torn')
    second = StatsLogger(config, total_steps=9, step=3)
    second.write(4, PolicyVersion(2, 4), {"loss": 1.0})
    second.close()
    assert [(record["step"], record["version"]) for record in records(config)] == [
        (1, "v1.1"),
        (2, "v1.2"),
        (3, "v1.3"),
        (4, "v2.4"),
    ]


def test_a_fresh_run_begins_a_new_file(config: ExperimentConfig) -> None:
    for _ in range(2):
        logger = StatsLogger(config, total_steps=9, step=-1)
        logger.write(1, PolicyVersion(1, 1), {})
        logger.close()
    assert len(records(config)) == 1


def test_a_sink_that_fails_is_named_and_left_out(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(sinks.JsonlSink):
        def write(self, step: int, record: object) -> None:
            raise OSError("no space left")

    monkeypatch.setattr(sinks, "JsonlSink", Full)
    logger = StatsLogger(config, total_steps=9, step=-1)
    logger.write(1, PolicyVersion(1, 1), {"loss": 1.0})
    logger.write(2, PolicyVersion(1, 2), {"loss": 1.0})
    logger.close()
    assert caplog.text.count("no longer go to stats.jsonl") == 1
    assert logger.last["loss"] == 1.0


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    settings = {"cluster": {"fileroot": str(tmp_path)}, "stats_logger": {"tensorboard": {"path": str(tmp_path / "tb")}}}
    logger = StatsLogger(ExperimentConfig.model_validate(settings), total_steps=9, step=-1)
    logger.write(1, PolicyVersion(1, 1), {"ppo_actor/update/actor_loss/avg": 0.5})
    logger.close()
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))


class FakeRun:
    """What `wandb.init` returns."""

    def __init__(self, mode: str, about: dict[str, object]) -> None:
        self.mode, self.about = mode, about
        self.logged: list[tuple[int, dict[str, object]]] = []
        self.is_finished = False

    def log(self, record: dict[str, object], step: int) -> None:
        self.logged.append((step, record))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A stand-in for the package, in a world without its server."""
    runs: list[FakeRun] = []
    module = types.ModuleType("wandb")

    def init(mode: str, settings: object = None, **about: object) -> FakeRun:
        if mode == "online":
            raise ConnectionError("no route to api.wandb.ai")
        runs.append(FakeRun(mode, about))
        return runs[-1]

    def login(**_: object) -> None:
        raise ConnectionError("no route to api.wandb.ai")

    module.init, module.login, module.Settings = init, login, dict
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_keeps_its_run_offline_where_its_server_is_away(
    tmp_path: Path, wandb_runs: list[FakeRun], mode: str
) -> None:
    wandb = {"mode": mode, "wandb_api_key": "secret-key"}
    settings = {"cluster": {"fileroot": str(tmp_path)}, "stats_logger": {"wandb": wandb}}
    logger = StatsLogger(ExperimentConfig.model_validate(settings), total_steps=9, step=-1)
    logger.write(3, PolicyVersion(1, 3), {"loss": 0.5})
    logger.close()
    (run,) = wandb_runs
    assert (run.mode, run.is_finished) == ("offline", True)
    assert [(step, record["loss"]) for step, record in run.logged] == [(3, 0.5)]
    assert "secret-key" not in str(run.about)
