"""Each objective equals a slow float64 reference written from its paper, in value and in gradient, on ragged samples.

The references walk over samples and tokens one by one, in the papers' own symbols, and know nothing of masks, shapes or
clamps. PPO arXiv:1707.06347 eq. 7, dual clip 1912.09729 eq. 5, decoupled PPO 2505.24298 eq. 5, GSPO 2507.18071 eq. 5-6,
SAPO 2511.20347, CISPO 2506.13585 eq. 4-5.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithm.losses import PolicyTokens, policy_loss
from headway.config.actor import ActorConfig

Sample = tuple[list[Tensor], list[float], list[float], list[float]]
"""log pi_theta (requires grad), log pi_prox, log pi_behave, advantage: of each token."""


def make_samples(seed: int, lengths: tuple[int, ...] = (3, 1, 5, 2, 4), spread: float = 0.5) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int, scale: float) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64) * scale

    samples = []
    for length in lengths:
        behave = -torch.rand(length, generator=generator, dtype=torch.float64) * 3
        prox = behave + noise(length, spread)
        theta = [x.clone().requires_grad_() for x in prox + noise(length, spread)]
        samples.append((theta, prox.tolist(), behave.tolist(), noise(length, 1.0).tolist()))
    return samples


def actor(**changes: Any) -> ActorConfig:
    return ActorConfig.model_validate({"eps_clip": 0.2, "use_decoupled_loss": False, **changes})


def ours(samples: list[Sample], config: ActorConfig, kept: list[bool] | None = None) -> tuple[float, list[float], Any]:
    """Mean loss over all tokens, its gradient, and the details."""
    logp = torch.tensor([x.item() for s in samples for x in s[0]], dtype=torch.float32, requires_grad=True)
    tokens = PolicyTokens(
        behaviour_logp=torch.tensor([x for s in samples for x in s[2]], dtype=torch.float32),
        prox_logp=torch.tensor([x for s in samples for x in s[1]], dtype=torch.float32),
        advantages=torch.tensor([x for s in samples for x in s[3]], dtype=torch.float32),
        sample_ids=torch.tensor([i for i, s in enumerate(samples) for _ in s[0]], dtype=torch.int64),
        kept=torch.tensor(kept if kept is not None else [True] * len(logp), dtype=torch.bool),
    )
    details = policy_loss(logp, tokens, config)
    loss = details.loss.sum() / max(1, len(logp))
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.tolist(), details


def reference(samples: list[Sample], token_loss: Callable[..., Tensor]) -> tuple[float, list[float]]:
    """Mean over all tokens of `token_loss(sample, t)`, and its gradient."""
    losses = [token_loss(sample, t) for sample in samples for t in range(len(sample[0]))]
    loss = torch.stack(losses).mean()
    theta = [x for sample in samples for x in sample[0]]
    gradients = torch.autograd.grad(loss, theta, allow_unused=True)
    return loss.item(), [0.0 if g is None else g.item() for g in gradients]


def assert_equal(samples: list[Sample], config: ActorConfig, token_loss: Callable[..., Tensor]) -> None:
    value, gradient, _ = ours(samples, config)
    expected, expected_gradient = reference(samples, token_loss)
    assert value == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert gradient == pytest.approx(expected_gradient, rel=1e-4, abs=1e-6)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, torch.tensor(low, dtype=x.dtype)), torch.tensor(high, dtype=x.dtype))


def ppo(ratio: Tensor, a: float, low: float, high: float, c: float | None = None) -> Tensor:
    objective = torch.minimum(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if c is not None and a < 0:
        objective = torch.maximum(objective, torch.tensor(c * a, dtype=objective.dtype))
    return -objective


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("higher", "c"), [(None, None), (0.28, None), (None, 1.5), (0.28, 3.0)])
def test_ppo_with_clip_higher_and_dual_clip(seed: int, higher: float | None, c: float | None) -> None:
    def loss(sample: Sample, t: int) -> Tensor:
        ratio = torch.exp(sample[0][t] - sample[1][t])
        return ppo(ratio, sample[3][t], 0.2, higher or 0.2, c)

    assert_equal(make_samples(seed), actor(eps_clip_higher=higher, c_clip=c), loss)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled"])
def test_decoupled_ppo_weighs_the_clipped_objective_by_proximal_over_behaviour(seed: int, mode: str) -> None:
    cap = 1.3

    def loss(sample: Sample, t: int) -> Tensor:
        log_weights = [prox - behave for prox, behave in zip(sample[1], sample[2], strict=True)]
        log_weight = sum(log_weights) / len(log_weights) if mode.startswith("sequence") else log_weights[t]
        weight = math.exp(log_weight)
        if weight > cap:
            weight = 0.0 if mode.endswith("mask") else cap
        return (1.0 if mode == "disabled" else weight) * ppo(
            torch.exp(sample[0][t] - sample[1][t]), sample[3][t], 0.2, 0.2
        )

    config = actor(use_decoupled_loss=True, behave_imp_weight_mode=mode, behave_imp_weight_cap=cap)
    assert_equal(make_samples(seed), config, loss)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("metric", ["ratio", "kl_k1", "kl_k2", "kl_k3"])
@pytest.mark.parametrize(
    ("level", "agg"), [("token", "mean"), ("sequence", "sum"), ("sequence", "mean"), ("sequence", "max")]
)
def test_rejection_sampling_leaves_out_what_is_outside_the_bounds(seed: int, metric: str, level: str, agg: str) -> None:
    upper, lower = (1.6, 0.6) if metric == "ratio" else (0.2, -0.3)

    def measure(d: float) -> float:
        return {"ratio": d, "kl_k1": d, "kl_k2": d * d / 2, "kl_k3": math.exp(-d) - 1 + d}[metric]

    def loss(sample: Sample, t: int) -> Tensor:
        distances = [prox - behave for prox, behave in zip(sample[1], sample[2], strict=True)]
        weight = math.exp(distances[t])
        measured = measure(distances[t])
        if level == "sequence":
            all_measured = [measure(d) for d in distances]
            measured = {
                "sum": sum(all_measured),
                "mean": sum(all_measured) / len(all_measured),
                "max": max(all_measured),
            }[agg]
            if metric == "ratio":
                weight = math.exp(sum(distances) / len(distances))
        if metric == "ratio":
            measured = math.exp(measured)
        weight = weight if lower <= measured <= upper else 0.0
        return weight * ppo(torch.exp(sample[0][t] - sample[1][t]), sample[3][t], 0.2, 0.2)

    rule = {"level": level, "agg": agg, "metric": metric, "action": "mask", "upper": upper, "lower": lower}
    assert_equal(make_samples(seed), actor(use_decoupled_loss=True, rejection_sampling=rule), loss)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("c", [None, 2.0])
def test_gspo_takes_one_ratio_and_the_mean_advantage_of_a_sequence(seed: int, c: float | None) -> None:
    def loss(sample: Sample, _: int) -> Tensor:
        theta, prox, _, advantages = sample
        length = len(theta)
        s = torch.exp(sum((x - y for x, y in zip(theta, prox, strict=True)), start=torch.zeros(())) / length)
        return ppo(s, sum(advantages) / length, 0.2, 0.2, c)

    assert_equal(make_samples(seed), actor(importance_sampling_level="sequence", c_clip=c), loss)


def test_gspo_leaves_tokens_that_are_left_out_out_of_its_means() -> None:
    (sample,) = make_samples(5, lengths=(4,))
    kept = [True, False, True, False]
    config = actor(importance_sampling_level="sequence")
    value, gradient, _ = ours([sample], config, kept=kept)
    shorter = tuple([x for x, keep in zip(part, kept, strict=True) if keep] for part in sample)
    alone, alone_gradient, _ = ours([shorter], config)  # type: ignore[list-item]
    assert value * 4 == pytest.approx(alone * 2, rel=1e-5)
    assert [g * 4 for g in gradient[::2]] == pytest.approx([g * 2 for g in alone_gradient], rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_sapo_gates_by_a_sigmoid_whose_slope_depends_on_the_sign(seed: int) -> None:
    def loss(sample: Sample, t: int) -> Tensor:
        tau = 1.0 if sample[3][t] > 0 else 1.7
        ratio = torch.exp(sample[0][t] - sample[1][t])
        return -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * sample[3][t]

    assert_equal(make_samples(seed), actor(use_sapo_loss=True, sapo_tau_pos=1.0, sapo_tau_neg=1.7), loss)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_cispo_clips_the_weight_and_keeps_every_gradient(seed: int, is_decoupled: bool) -> None:
    def loss(sample: Sample, t: int) -> Tensor:
        r = clip(torch.exp(sample[0][t] - sample[1][t]), 0.8, 1.28).detach()
        w = min(math.exp(sample[1][t] - sample[2][t]), 1.3) if is_decoupled else 1.0
        return -w * r * sample[3][t] * sample[0][t]

    changes = {"behave_imp_weight_mode": "token_truncate", "behave_imp_weight_cap": 1.3} if is_decoupled else {}
    config = actor(use_cispo_loss=True, eps_clip_higher=0.28, use_decoupled_loss=is_decoupled, **changes)
    assert_equal(make_samples(seed), config, loss)


def test_on_policy_gradient_is_the_advantage_whatever_the_variant() -> None:
    """With theta = prox = behave, every objective is REINFORCE: d loss / d logp = -A / number of tokens."""
    samples = make_samples(0, lengths=(2, 2), spread=0.0)
    variants: list[dict[str, Any]] = [
        {}, {"c_clip": 3.0}, {"use_sapo_loss": True}, {"use_cispo_loss": True}, {"use_decoupled_loss": True},
    ]  # fmt: skip
    expected = [-a / 4 for s in samples for a in s[3]]
    for changes in variants:
        assert ours(samples, actor(**changes))[1] == pytest.approx(expected, rel=1e-4), changes


def test_no_token_in_the_loss_gives_a_zero_loss_and_no_gradient() -> None:
    for changes in (
        {},
        {"use_decoupled_loss": True},
        {"importance_sampling_level": "sequence"},
        {"use_sapo_loss": True},
    ):
        assert ours([], actor(**changes))[:2] == (0.0, [])
        samples = make_samples(1)
        value, gradient, _ = ours(samples, actor(**changes), kept=[False] * 15)
        assert value == 0.0
        assert gradient == [0.0] * 15


def test_tokens_left_out_neither_carry_gradient_nor_scale_up_the_others() -> None:
    samples = make_samples(2, lengths=(1,) * 6)
    kept = [True, False, True, True, False, True]
    value, gradient, _ = ours(samples, actor(), kept=kept)
    alone, alone_gradient, _ = ours([s for s, keep in zip(samples, kept, strict=True) if keep], actor())
    assert value * 6 == pytest.approx(alone * 4, rel=1e-5)
    assert [g for g, keep in zip(gradient, kept, strict=True) if not keep] == [0.0, 0.0]
    assert [g * 6 for g, keep in zip(gradient, kept, strict=True) if keep] == pytest.approx(
        [g * 4 for g in alone_gradient]
    )


@pytest.mark.parametrize("distance", [-9999.0, -200.0, 200.0, 9999.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_log_ratios_stay_finite(distance: float, level: str) -> None:
    """Behaviour log-probs of -9999 (an engine's way to say nothing) and broken proximal ones give no NaN or Inf."""
    theta = [torch.tensor(-1.0), torch.tensor(-2.0)]
    for prox, behave in (([-1.0, -2.0], [-1.0 + distance, -2.0]), ([-1.0 + distance, -2.0], [-1.0, -2.0])):
        for mode in ("mask", "truncate", None):
            changes = {"behave_imp_weight_mode": f"{level}_{mode}", "use_decoupled_loss": True} if mode else {}
            config = actor(importance_sampling_level=level, **changes)
            value, gradient, details = ours([(theta, prox, behave, [1.0, -1.0])], config)
            assert math.isfinite(value)
            assert all(math.isfinite(g) for g in gradient)
            if mode is not None:
                assert details.behaviour_weight.max() <= 5.0


def test_an_absurd_behaviour_probability_is_masked_and_its_neighbours_are_not() -> None:
    theta = [torch.tensor(-1.0), torch.tensor(-2.0)]
    config = actor(use_decoupled_loss=True, behave_imp_weight_mode="token_mask")
    _, gradient, details = ours([(theta, [-1.0, -2.0], [-9999.0, -2.0], [1.0, 1.0])], config)
    assert details.kept.tolist() == [False, True]
    assert gradient == pytest.approx([0.0, -0.5])


def test_details_say_where_the_clips_acted() -> None:
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 8.0], [1.0, -1.0, 1.0, -1.0, -1.0]
    theta = [torch.tensor(math.log(r)) for r in ratios]
    _, gradient, details = ours([(theta, [0.0] * 5, [0.0] * 5, advantages)], actor(c_clip=3.0))
    assert details.clipped.tolist() == [True, False, False, True, False]
    assert details.dual_clipped.tolist() == [False, False, False, False, True]
    assert [g != 0 for g in gradient] == [False, True, True, False, False]
