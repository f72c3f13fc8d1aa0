"""From rewards of samples to advantages of tokens, in AReaL's order.

    r   = reward + overlong penalty;  r = clip((r + bias) * scaling, +- clip);  r = reward_norm(r)
    rew = -kl_ctl * KL(old, ref) per token;  rew[last token in the loss] += r
    adv = GAE(rew, values or 0), over the tokens in the loss;  returns = adv + values;  adv = adv_norm(adv)

Where AReaL's behaviour differs: it adds r to the last token of the sequence, so a sample that ends in a masked token
(a tool's answer) loses its reward; it counts the loss mask as the completion's length, so masked tokens escape the
overlong penalty; and it guesses `no_eos` from padding. Here r goes to the last token that carries gradient, the length
is the number of generated tokens, and `no_eos` is the stop reason.

All of it runs on the whole batch, on the CPU, before samples are spread over ranks: normalisation is exact.
"""

import torch
from torch import Tensor

from headway.algorithm.batch import SampleBatch
from headway.algorithm.kl import approx_kl
from headway.algorithm.normalization import normalize
from headway.config.actor import ActorConfig
from headway.core.trajectory import NO_VERSION


def compute_advantages(batch: SampleBatch, config: ActorConfig) -> SampleBatch:
    """Fill in `final_rewards`, `kl_rewards`, `advantages` and `returns`.

    Raises:
        ValueError: `kl_ctl` is above 0 and the batch has no `ref_logp`, or `prox_logp` is needed and missing.
    """
    final_rewards = sample_rewards(batch, config)
    kl_rewards = _kl_rewards(batch, config)
    rewards = _with_terminal_rewards(kl_rewards, final_rewards, batch)
    returns = gae(rewards, batch, discount=config.discount, gae_lambda=config.gae_lambda)
    advantages = returns
    if config.adv_norm is not None:
        advantages = normalize(returns, batch.loss_mask, batch.group_ids[batch.sample_ids], config.adv_norm)
    return batch.with_(final_rewards=final_rewards, kl_rewards=kl_rewards, advantages=advantages, returns=returns)


def sample_rewards(batch: SampleBatch, config: ActorConfig) -> Tensor:
    """[N] float32: after penalty, bias, scaling, clipping, normalisation, and the rule for truncated samples."""
    rewards = batch.rewards + overlong_penalty(batch, config)
    rewards = ((rewards + config.reward_bias) * config.reward_scaling).clamp(-config.reward_clip, config.reward_clip)
    if config.reward_norm is not None:
        rewards = normalize(rewards, torch.ones_like(rewards, dtype=torch.bool), batch.group_ids, config.reward_norm)
    return rewards.masked_fill(batch.no_eos, 0.0) if config.mask_no_eos_with_zero else rewards


def overlong_penalty(batch: SampleBatch, config: ActorConfig) -> Tensor:
    """[N] float32, not positive: grows over the last `overlong_tokens` of the budget (DAPO, arXiv:2503.14476)."""
    if not config.overlong_reward_penalty or config.overlong_tokens is None:
        return torch.zeros_like(batch.rewards)
    generated = _sum_per_sample((batch.versions != NO_VERSION).float(), batch)
    exceeding = generated - (config.max_new_tokens - config.overlong_tokens)
    return -(exceeding / config.overlong_tokens * (config.overlong_penalty_factor or 1.0)).clamp(min=0)


def old_logp(batch: SampleBatch, config: ActorConfig) -> Tensor:
    """[T] the policy that the samples are held against: behaviour, or proximal where plain PPO recomputes it."""
    if config.use_decoupled_loss or not config.recompute_logprob:
        return batch.logprobs
    if batch.prox_logp is None:
        raise ValueError("recompute_logprob is on, but the batch has no prox_logp")
    return batch.prox_logp


def gae(
    rewards: Tensor, batch: SampleBatch, *, discount: float, gae_lambda: float, values: Tensor | None = None
) -> Tensor:
    """[T] float32 generalised advantages (arXiv:1506.02438) over the tokens in the loss, zero elsewhere.

    Args:
        rewards: [T]; those of tokens outside the loss are not counted.
        values: [T] a critic's value before each token; None: 0. The value after a sample's last token is 0.
    """
    counts = _sum_per_sample(batch.loss_mask.long(), batch)
    kept = rewards.double()[batch.loss_mask]
    if values is not None:
        kept = kept + _temporal_difference(values.double()[batch.loss_mask], counts, discount)
    decayed = _decayed_sums(kept, counts, discount * gae_lambda)
    return torch.zeros_like(rewards, dtype=torch.float32).masked_scatter(batch.loss_mask, decayed.float())


def _temporal_difference(values: Tensor, counts: Tensor, discount: float) -> Tensor:
    """[m] discount * V(next) - V, where nothing follows a sample's last token."""
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    last = counts.cumsum(0)[counts > 0] - 1
    return discount * following.index_fill(0, last, 0.0) - values


def _decayed_sums(x: Tensor, counts: Tensor, decay: float) -> Tensor:
    """[m] y[t] = x[t] + decay * y[t + 1] within each sample; `counts` [N] are the samples' entries in x."""
    steps = torch.nn.utils.rnn.pad_sequence([part.flip(0) for part in torch.split(x, counts.tolist())])
    if decay == 1.0:
        steps = steps.cumsum(0)
    else:
        for t in range(1, len(steps)):
            steps[t] += decay * steps[t - 1]
    return torch.cat([column[:count].flip(0) for column, count in zip(steps.T, counts.tolist(), strict=True)])


def _kl_rewards(batch: SampleBatch, config: ActorConfig) -> Tensor:
    """[T] the penalty of each token in the loss."""
    if config.kl_ctl == 0:
        return torch.zeros_like(batch.logprobs)
    if batch.ref_logp is None:
        raise ValueError("kl_ctl is above 0, but the batch has no ref_logp")
    kl = approx_kl(old_logp(batch, config), batch.ref_logp, config.kl_estimator)
    return (-config.kl_ctl * kl).masked_fill(~batch.loss_mask, 0.0)


def _with_terminal_rewards(token_rewards: Tensor, sample_rewards: Tensor, batch: SampleBatch) -> Tensor:
    """[T] with each sample's reward added to its last token in the loss."""
    counts = _sum_per_sample(batch.loss_mask.long(), batch)
    last = batch.loss_mask.nonzero().squeeze(1)[counts.cumsum(0)[counts > 0] - 1]
    return token_rewards.index_add(0, last, sample_rewards[counts > 0])


def _sum_per_sample(x: Tensor, batch: SampleBatch) -> Tensor:
    return x.new_zeros(batch.num_samples).index_add_(0, batch.sample_ids, x)
