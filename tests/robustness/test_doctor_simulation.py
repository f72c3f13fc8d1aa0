"""The doctor names the bottleneck of runs whose bottleneck is known: the real controller in virtual time."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from headway.doctor import Evidence, diagnose
from headway.runtime.supervisor import Supervisor
from headway.testing.scenario import Scenario
from headway.testing.simulation import Simulation
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.simulated import RealController
from services.rollout_controller.status import Status, Surroundings, step_status

BOTTLENECKS = {"generation-bound", "reward-bound", "concurrency-too-low", "bound-too-tight", "trainer-bound"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Kept(RealController):
    """Keeps the controller that it made."""

    made: RolloutController

    def make_controller(self, simulation: Simulation, supervisor: Supervisor) -> RolloutController:
        self.made = super().make_controller(simulation, supervisor)
        return self.made


def report_of(scenario: Scenario) -> dict[str, Any]:
    """Run a scenario; the controller's report at its end, with the shares of staleness that a trainer tells."""
    adapter = Kept()
    Simulation(scenario, adapter).run()
    status = Status("simulated", adapter.made, Surroundings(), 0.0).status(0.0).model_dump(mode="json")
    history = [step_status(record).model_dump(mode="json") for record in adapter.made.history.recent]
    for step in history:
        ages, total = step["tokens_by_staleness"], sum(step["tokens_by_staleness"].values())
        step["stats"] |= {f"rollout/staleness/fraction_{age}": count / total for age, count in ages.items()}
        step["stats"]["rollout/staleness/max"] = max(map(float, ages))
    return status | {"history": history, "evaluations": []}


BASE: dict[str, Any] = {"num_steps": 30, "batch_size": 4, "sigma": 0.3, "max_concurrent": 100}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("expected", "speeds"),
    [
        ("trainer-bound", {"train_s": 5.0, "eta": 2}),
        ("bound-too-tight", {"train_s": 0.1, "eta": 0}),
        ("generation-bound", {"train_s": 0.1, "eta": 8}),
        ("concurrency-too-low", {"train_s": 0.1, "eta": 4, "max_concurrent": 4}),
    ],
)
def test_the_bottleneck_of_a_simulated_run_is_named(expected: str, speeds: dict[str, Any], seed: int) -> None:
    found = {one.code for one in diagnose(Evidence(report_of(Scenario(seed=seed, **BASE | speeds))))}
    assert found & BOTTLENECKS == {expected}


def test_a_run_in_balance_has_no_problem() -> None:
    balanced = Scenario(seed=1, **BASE | {"train_s": 1.0, "eta": 2})
    assert not [one for one in diagnose(Evidence(report_of(balanced))) if one.severity == "problem"]
