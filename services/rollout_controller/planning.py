"""What a run would be like: the real controller in virtual time, on engines and a trainer of given speeds.

    experiment file (batch, group, bound, policy, concurrency) --+
    speeds, as measured or hoped for ----------------------------+--> simulate, for each bound --> Forecast

A large batch is scaled down together with the concurrency: what counts is their ratio.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway.config import ExperimentConfig
from headway.errors import InvalidInput
from headway.testing.scenario import Scenario
from services.rollout_controller.simulated import simulate

LARGEST_BATCH = 16
NUM_STEPS = 60
SETTLED = 20
"""Steps before the measurement begins."""
TRAINING_BOUND = 1.05
"""Steps that take no longer than so many times the training are bound by it."""
MEAN_TOKENS = 100.0
LONGEST = 20.0
"""Lengths end at so many times their mean, or at `gconfig.max_new_tokens`."""


@dataclass(frozen=True)
class Speeds:
    """How fast things are, and how long what is generated."""

    tokens_per_s: float
    """Of each request, at the concurrency that is planned for."""
    mean_tokens: float
    """Generated for a sample."""
    sigma: float
    """Spread of the lengths, which are log-normal; 0: all equal. Reasoning models have 0.5 to 1.2."""
    train_s: float
    """Of one train step."""
    load_s: float = 0.0
    """For which engines pause to take a version."""


@dataclass(frozen=True)
class Forecast:
    """What the simulation of one bound and concurrency came to."""

    eta: int
    max_concurrent: int
    step_s: float
    """From one train step to the next."""
    lost: float
    """Share of the generated tokens that do not carry gradient: too old, or of groups that were thrown away."""

    @property
    def useful_rate(self) -> float:
        """Batches a second, less what is lost of them."""
        return (1 - self.lost) / self.step_s

    def is_bound_by_training(self, train_s: float) -> bool:
        """Whether steps come as fast as the trainer makes them."""
        return self.step_s < TRAINING_BOUND * train_s


def forecasts(config: ExperimentConfig, speeds: Speeds, etas: Sequence[int]) -> Iterator[Forecast]:
    """One for each bound, with the concurrency of the file.

    Raises:
        InvalidInput: The lengths are longer than the file allows.
    """
    if speeds.mean_tokens > config.gconfig.max_new_tokens:
        raise InvalidInput(
            f"--mean-tokens {speeds.mean_tokens:g} is above gconfig.max_new_tokens, {config.gconfig.max_new_tokens}"
        )
    concurrency = config.rollout.max_concurrent_rollouts
    return (forecast(config, speeds, eta, concurrency) for eta in etas)


def forecast(config: ExperimentConfig, speeds: Speeds, eta: int, max_concurrent: int) -> Forecast:
    """What a bound and a concurrency (groups) lead to."""
    batch_size = config.rollout.consumer_batch_size
    scale = min(1.0, LARGEST_BATCH / batch_size)
    scenario = replace(
        _scenario(config, speeds),
        eta=eta,
        batch_size=max(1, round(scale * batch_size)),
        max_concurrent=max(1, round(scale * max_concurrent)),
    )
    findings = simulate(scenario)
    settled = findings.committed_at[SETTLED:]
    num_groups = NUM_STEPS * scenario.batch_size
    thrown = findings.num_discarded / (findings.num_discarded + num_groups)
    masked = findings.num_masked_tokens / max(1, findings.num_masked_tokens + findings.num_used_tokens)
    return Forecast(
        eta,
        max_concurrent,
        step_s=_unit_s(speeds) * (settled[-1] - settled[0]) / (len(settled) - 1),
        lost=1 - (1 - thrown) * (1 - masked),
    )


def _scenario(config: ExperimentConfig, speeds: Speeds) -> Scenario:
    """In units of `_unit_s` and hundredths of the mean length: long answers are simulated as fast as short ones."""
    unit_s, unit_tokens = _unit_s(speeds), speeds.mean_tokens / MEAN_TOKENS
    longest = min(LONGEST * speeds.mean_tokens, config.gconfig.max_new_tokens)
    return Scenario(
        seed=1,
        policy=config.rollout.staleness_policy,
        num_samples=config.gconfig.n_samples,
        num_servers=config.allocation.num_servers,
        num_steps=NUM_STEPS,
        mean_tokens=MEAN_TOKENS,
        sigma=speeds.sigma,
        max_tokens=math.ceil(longest / unit_tokens),
        tokens_per_s=speeds.tokens_per_s / unit_tokens * unit_s,
        train_s=speeds.train_s / unit_s,
        load_s=speeds.load_s / unit_s,
        reward_s=0.0,
        journal_s=0.0,
    )


def _unit_s(speeds: Speeds) -> float:
    return max(speeds.train_s, speeds.mean_tokens / speeds.tokens_per_s)
