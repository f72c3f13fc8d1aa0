"""Rewards become advantages in AReaL's order, and no reward is lost, moved to a masked token, or counted twice."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from headway.algorithm.advantages import compute_advantages, gae, overlong_penalty, sample_rewards
from headway.algorithm.batch import SampleBatch
from headway.algorithm.kl import approx_kl
from headway.config.actor import ActorConfig
from headway.core.trajectory import Group, StopReason, Trajectory

NEUTRAL = {"reward_norm": None, "adv_norm": None, "kl_ctl": 0.0, "reward_scaling": 1.0}


def actor(**changes: Any) -> ActorConfig:
    return ActorConfig.model_validate({**NEUTRAL, **changes})


def sample(
    mask: str, reward: float = 1.0, stop: StopReason = StopReason.STOP, generated: str | None = None
) -> Trajectory:
    """`mask` like "..XX.X": X carries gradient; `generated` likewise (default: the same tokens)."""
    carries = np.array([c == "X" for c in mask])
    made = np.array([c == "X" for c in generated or mask])
    length = len(mask)
    return Trajectory(
        input_ids=np.arange(length, dtype=np.int32),
        logprobs=np.where(made, -1.0, 0.0).astype(np.float32),
        loss_mask=carries,
        versions=np.where(made, 3, -1).astype(np.int32),
        reward=reward,
        stop_reason=stop,
    )


def batch_of(*samples: Trajectory, per_group: int = 1) -> SampleBatch:
    chunks = [samples[i : i + per_group] for i in range(0, len(samples), per_group)]
    return SampleBatch.from_groups([Group(f"0/{i}", tuple(chunk)) for i, chunk in enumerate(chunks)])


def random_batch(seed: int) -> SampleBatch:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(7):
        length = int(rng.integers(1, 9))
        mask = "".join(rng.choice(["X", "."], p=[0.6, 0.4]) for _ in range(length))
        samples.append(sample(mask, reward=float(rng.normal())))
    return batch_of(*samples)


def reference_gae(
    rewards: list[float], values: list[float], mask: list[bool], discount: float, lam: float
) -> list[float]:
    """Its definition, arXiv:1506.02438 eq. 16: the sum over l of (discount * lam)^l delta(t + l), over kept tokens."""
    kept = [i for i, keep in enumerate(mask) if keep]
    out = [0.0] * len(mask)
    for t, i in enumerate(kept):
        for later in range(t, len(kept)):
            following = values[kept[later + 1]] if later + 1 < len(kept) else 0.0
            delta = rewards[kept[later]] + discount * following - values[kept[later]]
            out[i] += (discount * lam) ** (later - t) * delta
    return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 1.0), (0.95, 0.8), (1.0, 0.0)])
@pytest.mark.parametrize("has_critic", [False, True])
def test_gae_equals_its_definition_on_ragged_samples(seed: int, discount: float, lam: float, has_critic: bool) -> None:
    batch = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(batch.num_tokens, generator=generator)
    values = torch.randn(batch.num_tokens, generator=generator)
    found = gae(rewards, batch, discount=discount, gae_lambda=lam, values=values if has_critic else None)
    expected: list[float] = []
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        part = slice(start, start + length)
        critic = values[part].tolist() if has_critic else [0.0] * length
        expected += reference_gae(rewards[part].tolist(), critic, batch.loss_mask[part].tolist(), discount, lam)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_sample_that_ends_in_a_masked_token_keeps_its_reward() -> None:
    batch = compute_advantages(batch_of(sample("..XX..XX..", reward=2.0)), actor())
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0, 0, 2, 2, 0, 0, 2, 2, 0, 0]


def test_a_sample_without_a_token_in_the_loss_does_not_give_its_reward_to_a_neighbour() -> None:
    batch = compute_advantages(batch_of(sample("..XX", 1.0), sample("....", 5.0), sample(".X", 3.0)), actor())
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 3]


def test_a_batch_without_a_token_in_the_loss_gives_zeros() -> None:
    config = actor(adv_norm={"mean_level": "batch", "std_level": "batch"})
    batch = compute_advantages(batch_of(sample("...."), sample("..")), config)
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0.0] * 6


def test_rewards_are_biased_scaled_clipped_then_normalised() -> None:
    scale = {"reward_bias": -0.5, "reward_scaling": 10.0, "reward_clip": 4.0}
    batch = batch_of(*(sample(".X", r) for r in (0.0, 1.0, 0.6, 0.5)), per_group=2)
    assert sample_rewards(batch, actor(**scale)).tolist() == pytest.approx([-4.0, 4.0, 1.0, 0.0])
    normed = actor(**scale, reward_norm={"mean_level": "group", "std_level": None})
    assert sample_rewards(batch, normed).tolist() == pytest.approx([-4.0, 4.0, 0.5, -0.5])


def test_overlong_penalty_counts_generated_tokens_from_the_start_of_the_tail() -> None:
    config = actor(overlong_reward_penalty=True, overlong_tokens=4, overlong_penalty_factor=0.5, max_new_tokens=8)
    masked_out = sample(".........", generated=".XXXXXXXX")
    samples = (sample("." + "X" * 4), sample("." + "X" * 6), sample("." + "X" * 8), masked_out)
    assert overlong_penalty(batch_of(*samples), config).tolist() == pytest.approx([0.0, -0.25, -0.5, -0.5])
    assert sample_rewards(batch_of(*samples), config).tolist() == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_truncated_samples_get_no_task_reward_where_asked() -> None:
    batch = batch_of(sample(".X", 1.0, StopReason.LENGTH), sample(".X", 1.0, StopReason.STOP))
    assert sample_rewards(batch, actor(mask_no_eos_with_zero=True)).tolist() == [0.0, 1.0]
    assert sample_rewards(batch, actor()).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_a_reward_of_every_token_in_the_loss(estimator: Any) -> None:
    batch = batch_of(sample("..XX.", reward=1.0))
    ref = torch.tensor([9.0, 9.0, -1.5, -0.2, 9.0])
    found = compute_advantages(batch.with_(ref_logp=ref), actor(kl_ctl=0.1, kl_estimator=estimator))
    penalties = []
    for base in (-1.5, -0.2):
        d = -1.0 - base
        penalties.append(-0.1 * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator])
    assert found.kl_rewards is not None
    assert found.advantages is not None
    assert found.kl_rewards.tolist() == pytest.approx([0, 0, *penalties, 0], rel=1e-5)
    expected = [0, 0, penalties[0] + penalties[1] + 1.0, penalties[1] + 1.0, 0]
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-5)


def test_kl_is_measured_from_the_recomputed_policy_in_plain_ppo_and_from_behaviour_in_decoupled() -> None:
    batch = batch_of(sample(".X", 0.0)).with_(ref_logp=torch.tensor([0.0, -1.0]), prox_logp=torch.tensor([0.0, -3.0]))
    plain = compute_advantages(batch, actor(kl_ctl=1.0, recompute_logprob=True))
    decoupled = compute_advantages(batch, actor(kl_ctl=1.0, recompute_logprob=True, use_decoupled_loss=True))
    assert plain.kl_rewards is not None
    assert decoupled.kl_rewards is not None
    assert plain.kl_rewards.tolist() == [0.0, 2.0]
    assert decoupled.kl_rewards.tolist() == [0.0, 0.0]


def test_a_missing_reference_is_an_error_not_a_penalty_on_logp() -> None:
    with pytest.raises(ValueError, match="ref_logp"):
        compute_advantages(batch_of(sample(".X")), actor(kl_ctl=0.1))


def test_kl_estimates_are_clamped() -> None:
    far = torch.tensor([-100.0, 100.0])
    assert approx_kl(far, torch.zeros(2), "k1").tolist() == [-10.0, 10.0]
    assert approx_kl(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]


def test_advantages_are_normalised_over_the_tokens_in_the_loss_only() -> None:
    config = actor(adv_norm={"mean_level": "batch", "std_level": "batch", "eps": 1e-9})
    found = compute_advantages(batch_of(sample(".XXX.", 1.0), sample("..X", 5.0)), config).advantages
    assert found is not None
    x = np.array([1.0, 1.0, 1.0, 5.0])
    y = (x - x.mean()) / x.std(ddof=1)
    assert found.tolist() == pytest.approx([0, y[0], y[1], y[2], 0, 0, 0, y[3]], rel=1e-5)
