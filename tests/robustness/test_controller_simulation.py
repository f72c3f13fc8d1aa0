"""The real controller in virtual time, among servers that get lost, trainers that are replaced, and kills with writes
in flight.

A failure names its seed; `HEADWAY_SEEDS=4711 pytest tests/robustness/test_controller_simulation.py` runs that one
again. What is checked, and when, is in `headway/testing/invariants.py`.
"""

import logging
import os
from collections.abc import Iterator

import pytest

from headway.core.selection import StalenessPolicy
from headway.testing.invariants import Broken
from headway.testing.scenario import Fault, Scenario
from headway.testing.simulated_disk import SimulatedDisk
from headway.testing.simulation import Simulation
from services.rollout_controller.journal_store import JournalStore
from services.rollout_controller.simulated import RealController, simulate


def seeds(count: int) -> list[int]:
    """Those asked for, or the first few."""
    return [int(seed) for seed in os.environ.get("HEADWAY_SEEDS", "").split(",") if seed] or list(range(count))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of expected failures are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_whatever_a_seed_brings_the_invariants_hold() -> None:
    for seed in seeds(40):
        simulate(Scenario.of(seed))


@pytest.mark.slow
def test_a_thousand_seeds_hold_the_invariants() -> None:
    for seed in seeds(1000):
        simulate(Scenario.of(seed))


def test_the_same_seed_is_the_same_run() -> None:
    for seed in seeds(8):
        assert simulate(Scenario.of(seed)) == simulate(Scenario.of(seed))


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_eta_0_is_exactly_synchronous(policy: StalenessPolicy) -> None:
    findings = simulate(Scenario(seed=1, eta=0, policy=policy, sigma=1.2))
    assert (findings.num_steps, findings.oldest, findings.num_masked_tokens, findings.num_discarded) == (10, 0, 0, 0)


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("eta", [1, 2])
def test_what_each_policy_does_with_heavy_tailed_lengths(policy: StalenessPolicy, eta: int) -> None:
    """Some rollouts take many steps. That is where the policies differ."""
    findings = simulate(
        Scenario(
            seed=5, eta=eta, policy=policy, sigma=1.2, num_steps=40, max_tokens=2000, train_s=0.2, max_concurrent=100
        )
    )
    assert findings.num_steps == 40
    assert (findings.oldest > eta) == (policy is StalenessPolicy.ALLOW)
    assert (findings.num_masked_tokens > 0) == (policy is StalenessPolicy.MASK)
    assert (findings.num_discarded > 0) == (policy is StalenessPolicy.DISCARD)


def test_little_is_too_old_when_eta_is_two_more_than_generation_takes_batches() -> None:
    """Two batches are generated at once, and training takes as long as half of one: both are always busy. No scheduler
    loses less than 4.5 % then: rollouts that take longer than eta steps, read at the first step after their end."""
    batch, mean_s = 16, 4.0
    findings = simulate(
        Scenario(
            seed=1, batch_size=batch, eta=4, num_samples=1, max_concurrent=2 * batch, num_steps=70, sigma=0.5,
            mean_tokens=100, tokens_per_s=100 / mean_s, train_s=mean_s / 2, load_s=0, journal_s=0, reward_s=0,
        )
    )  # fmt: skip
    first, last = findings.committed_at[20], findings.committed_at[-1]
    assert (last - first) / (69 - 20) < 1.03 * mean_s / 2
    assert findings.num_masked_tokens < 0.05 * (findings.num_masked_tokens + findings.num_used_tokens)


def test_a_poison_prompt_costs_the_others_less_than_a_tenth() -> None:
    calm = simulate(Scenario(seed=3, num_steps=40))
    poisoned = simulate(Scenario(seed=3, num_steps=40, poison_every=7))
    assert poisoned.num_quarantined > 10
    assert poisoned.seconds < 1.1 * calm.seconds


def test_after_a_killed_trainer_the_next_one_gets_the_same_batches_again() -> None:
    crash = Fault(at_s=8.0, kind="trainer", down_s=1.0)
    findings = simulate(Scenario(seed=2, num_steps=20, checkpoint_every=8, faults=(crash,)))
    assert findings.num_steps == 20
    assert findings.num_replayed > 0


def test_a_planted_fault_is_found() -> None:
    """The simulation can see what it is there to see: a broken promise raises, with its seed."""

    class Forgetful(SimulatedDisk[JournalStore]):
        def kill(self, writes_first: bool) -> None:
            super().kill(writes_first)
            self.store.clear()

    class WithForgetfulDisk(RealController):
        def make_disk(self, simulation: Simulation) -> SimulatedDisk[JournalStore]:
            return Forgetful(JournalStore(":memory:"), simulation.scenario.journal_s)

    kill = Fault(at_s=5.0, kind="controller", down_s=1.0)
    with pytest.raises(Broken, match=r"seed 1: .*I1"):
        Simulation(Scenario(seed=1, eta=3, faults=(kill,)), WithForgetfulDisk()).run()
