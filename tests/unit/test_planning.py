"""`headway plan` foretells what arithmetic says where arithmetic suffices, and names what holds back."""

from pathlib import Path

import pytest

from headway.config import ExperimentConfig, read_experiment
from headway.errors import InvalidInput
from services.rollout_controller.plan_command import advice
from services.rollout_controller.planning import Speeds, forecast, forecasts

FILE = Path("configs/quickstart.yaml")
SIZES = ["train_dataset.batch_size=8", "rollout.max_concurrent_rollouts=8", "gconfig.n_samples=2"]


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return read_experiment(FILE, SIZES).config


def speeds(train_s: float, sigma: float = 0.0) -> Speeds:
    """Eight tokens take eight seconds."""
    return Speeds(tokens_per_s=1.0, mean_tokens=8.0, sigma=sigma, train_s=train_s)


def test_synchronous_steps_take_turns_and_asynchronous_ones_overlap(config: ExperimentConfig) -> None:
    by_eta = list(forecasts(config, speeds(train_s=8.0), [0, 2]))
    assert [one.step_s for one in by_eta] == pytest.approx([16.0, 8.0], rel=0.05)


def test_what_holds_back_is_named(config: ExperimentConfig) -> None:
    slow_trainer = list(forecasts(config, speeds(train_s=20.0), [0, 2]))
    slow_engines = list(forecasts(config, speeds(train_s=2.0), [0, 2]))
    assert advice(config, slow_trainer, 20.0).endswith("the trainer.")
    assert advice(config, slow_engines, 2.0).endswith("generation.")


def test_more_at_once_is_faster_where_generation_holds_back(config: ExperimentConfig) -> None:
    few, many = (forecast(config, speeds(train_s=1.0), eta=4, max_concurrent=number) for number in (8, 24))
    assert many.step_s < few.step_s / 2


def test_long_answers_beyond_a_small_bound_are_lost(config: ExperimentConfig) -> None:
    small, large = forecasts(config, speeds(train_s=4.0, sigma=1.2), [1, 8])
    assert large.lost < small.lost


def test_lengths_above_the_files_limit_are_refused(config: ExperimentConfig) -> None:
    with pytest.raises(InvalidInput, match=r"gconfig\.max_new_tokens"):
        forecasts(config, Speeds(1.0, 1e6, 0.0, 1.0), [0])
