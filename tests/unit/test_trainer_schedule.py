"""A run ends at the earliest of its limits; what is due is due by whichever clock says so first."""

import pytest

from headway.config import ExperimentConfig
from headway.config.dataset import Frequency
from headway.errors import InvalidInput
from services.trainer.schedule import Due, RunLength


def length(**limits: object) -> int:
    config = ExperimentConfig.model_validate(
        {"train_dataset": {"batch_size": 8}, "gconfig": {"n_samples": 4}, "total_train_epochs": 3, **limits}
    )
    return RunLength.of(config, tasks_per_epoch=80).total_steps


def test_the_earliest_limit_ends_training() -> None:
    assert length() == 30
    assert length(total_train_steps=7) == 7
    assert length(total_train_steps=70) == 30
    assert length(total_train_n_seqs=100) == 4
    assert length(total_train_n_seqs=96) == 3


def test_a_run_without_a_step_is_refused() -> None:
    config = ExperimentConfig.model_validate({"train_dataset": {"batch_size": 8}})
    with pytest.raises(InvalidInput, match="total_train_epochs leaves no train step"):
        RunLength.of(config, tasks_per_epoch=7)


def test_epochs_that_end_within_a_step_are_due_in_that_step() -> None:
    due = Due(Frequency(freq_epochs=2), RunLength(100, batch_size=8, tasks_per_epoch=20), now=0.0)
    assert [step for step in range(1, 16) if due.is_due(step, now=0.0)] == [5, 10, 15]


def test_acting_for_any_reason_restarts_the_clock_of_seconds() -> None:
    due = Due(Frequency(freq_steps=3, freq_secs=10), RunLength(100, 8, 80), now=0.0)
    acted = [step for step in range(1, 9) if due.is_due(step, now=4.0 * step)]
    assert acted == [3, 6]


def test_nothing_configured_is_never_due() -> None:
    due = Due(Frequency(), RunLength(100, 8, 80), now=0.0)
    assert not any(due.is_due(step, now=1e9) for step in range(1, 50))
