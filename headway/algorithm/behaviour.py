"""How far the policy that made a token may be from the proximal one: weights, and what is left out (decoupled PPO).

The weight of a token is w = exp(prox - behaviour), arXiv:2505.24298 eq. 5. A rule bounds it: tokens (or sequences)
outside the bounds are left out, or their weight is clamped. All inputs are the tokens in the loss, [m].
Differences are taken in float32 and clamped to +- LARGEST_LOG_RATIO, so that an absurd behaviour log-probability gives
a huge but finite weight, which a bound then removes (AReaL makes a weight of 1 of a difference that is not finite).
"""

import torch
from torch import Tensor

from headway.algorithm.kl import approx_kl
from headway.config.actor import RejectionSamplingConfig

LARGEST_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, finite for every finite input; no gradient where the clamp acts."""
    return log_ratio.float().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def behaviour_weights(
    prox_logp: Tensor, behaviour_logp: Tensor, sample_ids: Tensor, rule: RejectionSamplingConfig | None
) -> tuple[Tensor, Tensor]:
    """Weights [m] float32 and which tokens are kept [m] bool, without gradient. No rule: unbounded weights, all kept.

    At level `sequence` with metric `ratio`, all tokens of a sequence share the geometric mean of their weights.
    """
    log_weight = (prox_logp.detach().float() - behaviour_logp.float()).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    everything = torch.ones_like(log_weight, dtype=torch.bool)
    if rule is None:
        return log_weight.exp(), everything
    metric = _metric(log_weight, rule)
    if rule.level == "sequence":
        metric = per_sequence(metric, sample_ids, rule.agg)
        if rule.metric == "ratio":
            log_weight = per_sequence(log_weight, sample_ids, "mean")
    measured = metric.exp() if rule.metric == "ratio" else metric
    inside = (measured <= rule.upper) & (measured >= (rule.lower if rule.lower is not None else -torch.inf))
    if rule.action == "mask":
        return log_weight.exp() * inside, inside
    clamped = log_weight.exp().clamp(rule.lower or 0.0, rule.upper)
    return torch.where(inside, log_weight.exp(), clamped), everything


def per_sequence(x: Tensor, sample_ids: Tensor, how: str) -> Tensor:
    """[m] the `sum`, `mean` or `max` over the tokens of each token's sequence. Differentiable for sum and mean."""
    num_samples = int(sample_ids.max()) + 1 if len(sample_ids) else 0
    if how == "max":
        return x.new_full((num_samples,), -torch.inf).scatter_reduce(0, sample_ids, x, "amax")[sample_ids]
    total = x.new_zeros(num_samples).index_add(0, sample_ids, x)
    if how == "mean":
        total = total / torch.bincount(sample_ids, minlength=num_samples).clamp(min=1)
    return total[sample_ids]


def _metric(log_weight: Tensor, rule: RejectionSamplingConfig) -> Tensor:
    """[m] what is summed over a sequence: the logarithm of the ratio (so that the mean is geometric), or a KL estimate.

    The KL estimates are of KL(prox, behaviour), as AReaL's: its k3 is exp(-d) - 1 + d with d = prox - behaviour.
    """
    if rule.metric == "ratio":
        return log_weight
    estimator = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}[rule.metric]
    return approx_kl(log_weight, torch.zeros_like(log_weight), estimator, clamp=False)  # type: ignore[arg-type]
