"""The objectives of the policy, token by token: PPO, decoupled PPO, GSPO, SAPO, CISPO.

    ratio = exp(logp - prox)    `sequence` (GSPO, arXiv:2507.18071): exp of the mean over the sequence, advantages too
    PPO     L = max(-A * ratio, -A * clip(ratio, 1 - eps_clip, 1 + eps_clip_higher));  A < 0: L = min(L, -c_clip * A)
    SAPO    L = -A * 4 / tau * sigmoid(tau * (ratio - 1)), tau by the sign of A                      arXiv:2511.20347
    CISPO   L = -A * stop_gradient(clip(ratio)) * logp                                               arXiv:2506.13585
    decoupled: L = w * L with w = exp(prox - behaviour), bounded                                     arXiv:2505.24298

Inputs are the tokens in the loss, [m], in one order; nothing outside the loss is ever looked at. The loss of a
mini-batch is the sum of the returned losses over the number of its tokens in the loss, over all micro-batches and
ranks: tokens that a rule leaves out count in that number, so that leaving out does not scale up the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithm.behaviour import behaviour_weights, bounded_exp, per_sequence
from headway.config.actor import ActorConfig


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What the loss knows of each token; [m] each."""

    behaviour_logp: Tensor
    prox_logp: Tensor
    """Of the policy around which the ratio is clipped."""
    advantages: Tensor
    sample_ids: Tensor
    """Not negative; tokens of one sequence share it and are all here."""
    kept: Tensor
    """Bool; false where an earlier rule left the token out."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses and what is worth knowing about them; [m] each, all but `loss` without gradient."""

    loss: Tensor
    """Zero where the token is left out."""
    ratio: Tensor
    clipped: Tensor
    """Bool; the clipped value was taken."""
    dual_clipped: Tensor
    """Bool."""
    behaviour_weight: Tensor
    """1 where the loss is not decoupled."""
    kept: Tensor
    """Bool."""


def policy_loss(logp: Tensor, tokens: PolicyTokens, config: ActorConfig) -> PolicyLoss:
    """The configured objective for log-probabilities `logp` [m] under the policy in training."""
    weight, inside = _weights(tokens, config)
    kept = tokens.kept & inside
    ratio, advantages = _ratio(logp, tokens, kept, config.importance_sampling_level)
    never = torch.zeros_like(kept)
    clipped, dual_clipped = never, never
    if config.use_sapo_loss:
        loss = sapo(ratio, advantages, config.sapo_tau_pos, config.sapo_tau_neg)
    elif config.use_cispo_loss:
        loss, clipped = cispo(logp, ratio.detach(), advantages, _bounds(config))
    else:
        loss, clipped, dual_clipped = clipped_surrogate(ratio, advantages, _bounds(config), config.c_clip)
    return PolicyLoss(
        loss=torch.where(kept, weight * loss, 0.0),
        ratio=ratio.detach(),
        clipped=clipped & kept,
        dual_clipped=dual_clipped & kept,
        behaviour_weight=weight,
        kept=kept,
    )


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], c_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's loss, where the clip chose, and where the dual clip (arXiv:1912.09729) chose."""
    free, held = -advantages * ratio, -advantages * ratio.clamp(*bounds)
    loss, clipped = torch.max(free, held), free.detach() < held.detach()
    if c_clip is None:
        return loss, clipped, torch.zeros_like(clipped)
    ceiling = torch.where(advantages < 0, -c_clip * advantages, torch.inf)
    return torch.min(loss, ceiling), clipped, ceiling < loss.detach()


def sapo(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Soft gates instead of a clip: the gradient fades as the ratio leaves 1."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


def cispo(logp: Tensor, ratio: Tensor, advantages: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A clipped importance weight without gradient: every token keeps the gradient of its log-probability."""
    weight = ratio.clamp(*bounds)
    return -advantages * weight * logp, weight != ratio


def _weights(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """Behaviour weights and who is inside the rule's bounds, over the tokens that are still kept."""
    weight, inside = torch.ones_like(tokens.prox_logp), torch.ones_like(tokens.kept)
    if not config.use_decoupled_loss or config.behave_rejection is None:
        return weight, inside
    here = tokens.kept.nonzero().squeeze(1)
    found = behaviour_weights(
        tokens.prox_logp[here], tokens.behaviour_logp[here], tokens.sample_ids[here], config.behave_rejection
    )
    return weight.index_copy(0, here, found[0]), inside.index_copy(0, here, found[1])


def _ratio(logp: Tensor, tokens: PolicyTokens, kept: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """The ratio and the advantages that go with it; 1 and 0 where a token is left out."""
    log_ratio = torch.where(kept, logp.float() - tokens.prox_logp, 0.0)
    advantages = torch.where(kept, tokens.advantages, 0.0)
    if level == "sequence":
        log_ratio, advantages = (_mean_of_kept(x, tokens.sample_ids, kept) for x in (log_ratio, advantages))
    return bounded_exp(log_ratio), advantages


def _mean_of_kept(x: Tensor, sample_ids: Tensor, kept: Tensor) -> Tensor:
    return per_sequence(x, sample_ids, "sum") / per_sequence(kept.float(), sample_ids, "sum").clamp(min=1)


def _bounds(config: ActorConfig) -> tuple[float, float]:
    higher = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    return 1 - config.eps_clip, 1 + higher
