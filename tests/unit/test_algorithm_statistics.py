"""Statistics are over all tokens of a step, whichever micro-batch or rank they were in, under AReaL's names."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.algorithm.batch import SampleBatch
from headway.algorithm.losses import PolicyTokens, policy_loss
from headway.algorithm.statistics import (
    TokenStatistics,
    approximation_statistics,
    batch_statistics,
    effective_sample_size,
    loss_statistics,
)
from headway.config.actor import ActorConfig
from headway.core.trajectory import Group, StopReason, Trajectory


def alone(x: Tensor, how: str) -> Tensor:
    return x


def test_averages_weigh_tokens_not_micro_batches() -> None:
    statistics = TokenStatistics()
    statistics.add({"x": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, True]))})
    statistics.add({"x": (torch.tensor([10.0, 99.0]), torch.tensor([True, False]))})
    statistics.add({"x": (torch.empty(0), torch.empty(0, dtype=torch.bool))})
    assert statistics.result(alone) == {"x/avg": 4.0, "x/min": 1.0, "x/max": 10.0}


def test_ranks_are_added_up() -> None:
    def with_a_twin(x: Tensor, how: str) -> Tensor:
        twin = x + 1 if how != "sum" else x
        return {"sum": x + twin, "min": torch.minimum(x, twin), "max": torch.maximum(x, twin)}[how]

    statistics = TokenStatistics()
    statistics.add({"x": (torch.tensor([1.0, 3.0]), torch.tensor([True, True]))})
    assert statistics.result(with_a_twin) == {"x/avg": 2.0, "x/min": 1.0, "x/max": 4.0}


def test_a_number_that_no_token_has_is_left_out() -> None:
    statistics = TokenStatistics()
    statistics.add({"clipped": (torch.tensor([1.0]), torch.tensor([False]))})
    assert statistics.result(alone) == {}
    assert TokenStatistics().result(alone) == {}


def decoupled_statistics() -> dict[str, float]:
    config = ActorConfig.model_validate({"use_decoupled_loss": True, "behave_imp_weight_cap": 2.0, "eps_clip": 0.2})
    logp, prox, behave = (
        torch.tensor([-1.0, -2.0, -3.0]),
        torch.tensor([-1.5, -2.0, -3.0]),
        torch.tensor([-1.0, -2.0, -9.0]),
    )
    tokens = PolicyTokens(
        behave, prox, torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
    )
    statistics = TokenStatistics()
    loss = policy_loss(logp, tokens, config)
    statistics.add(loss_statistics(logp, torch.tensor([0.5, 0.7, 0.9]), tokens, loss, is_decoupled=True))
    return statistics.result(alone)


def test_the_loss_reports_the_three_policies_apart() -> None:
    found = decoupled_statistics()
    k3 = lambda d: math.exp(-d) - 1 + d  # noqa: E731
    assert found["divergence/current_from_proximal/avg"] == pytest.approx(k3(0.5) / 3)
    assert found["divergence/proximal_from_behaviour/avg"] == pytest.approx((k3(-0.5) + k3(6.0)) / 3)
    assert found["approx_kl/avg"] == pytest.approx(0.5 / 3)
    assert found["entropy/avg"] == pytest.approx(0.7)
    assert found["importance_weight/max"] == pytest.approx(math.exp(0.5))
    assert found["clip_ratio/avg"] == pytest.approx(1 / 3)
    assert found["rs_filtered_fraction/avg"] == pytest.approx(1 / 3)
    assert found["behave_imp_weight/avg"] == pytest.approx((math.exp(-0.5) + 1) / 2)


def test_effective_sample_size_is_kishs() -> None:
    w = [math.exp(-0.5), 1.0]
    expected = sum(w) ** 2 / (2 * sum(x * x for x in w))
    assert effective_sample_size(decoupled_statistics())["effective_sample_size"] == pytest.approx(expected)
    assert effective_sample_size({}) == {}


def test_approximations_are_compared_with_the_recomputed_policy() -> None:
    statistics = TokenStatistics()
    prox, behave = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
    statistics.add(approximation_statistics({"loglinear": torch.tensor([-1.0, -1.5])}, prox, behave))
    found = statistics.result(alone)
    assert found["compute_logp/loglinear/abs_error/avg"] == pytest.approx(0.25)
    assert found["compute_logp/loglinear/squared_error/max"] == pytest.approx(0.25)


def make_batch() -> SampleBatch:
    def one(length: int, made: int, version: int, reward: float, stop: StopReason, masked: int = 0) -> Trajectory:
        generated = np.arange(length) >= length - made
        mask = generated & (np.arange(length) >= length - made + masked)
        versions = np.where(generated, version, -1).astype(np.int32)
        zeros = np.zeros(length, dtype=np.float32)
        return Trajectory(np.zeros(length, np.int32), zeros, mask, versions, reward, stop)

    first = (one(6, 4, 3, 1.0, StopReason.STOP), one(8, 6, 5, 0.0, StopReason.LENGTH, masked=2))
    return SampleBatch.from_groups([Group("0/0", first)])


def test_the_batch_reports_rewards_lengths_and_ages() -> None:
    found: dict[str, Any] = batch_statistics(make_batch(), ActorConfig(), version=5)
    assert found["n_seqs"] == 2
    assert found["n_tokens"] == 14
    assert found["n_generated_tokens"] == 10
    assert found["n_valid_tokens"] == 8
    assert found["task_reward/avg"] == 0.5
    assert found["no_eos_ratios/avg"] == 0.5
    assert found["prompt_len/avg"] == 2
    assert found["correct_seq_len/avg"] == 6
    assert found["incorrect_seq_len/avg"] == 8
    assert {k: v for k, v in found.items() if k.startswith("staleness")} == {
        "staleness_tokens/0": 4.0, "staleness_tokens/1": 0.0, "staleness_tokens/2": 4.0,
    }  # fmt: skip
    assert found["version_stats/sample_staleness_theta_avg"] == 1.0
    assert found["version_stats/sample_staleness_proximal_max"] == 1.0
