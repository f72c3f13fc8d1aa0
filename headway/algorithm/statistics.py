"""What a train step says about itself, under the names that AReaL logs: `ppo_actor/...` with `/avg`, `/min`, `/max`.

Numbers are added up as sums, counts, minima and maxima of tokens, micro-batch after micro-batch and over ranks, so an
average is over all tokens of the step wherever they were computed.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headway.algorithm.batch import SampleBatch
from headway.algorithm.kl import approx_kl
from headway.algorithm.losses import PolicyLoss, PolicyTokens
from headway.config.actor import ActorConfig
from headway.core.trajectory import NO_VERSION

Reduce = Callable[[Tensor, str], Tensor]
"""Adds up a tensor over ranks: (tensor, "sum" | "min" | "max") -> the result, the same on every rank."""


class TokenStatistics:
    """Running sums, counts, minima and maxima of named per-token numbers."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._totals: Tensor | None = None

    def add(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take in (values [m], mask [m]) by name; each call has the same names."""
        if not values:
            return
        numbers = torch.stack([number.detach().double() for number, _ in values.values()])
        masks = torch.stack([mask for _, mask in values.values()])
        new = torch.stack(
            [
                numbers.masked_fill(~masks, 0.0).sum(1),
                masks.sum(1).double(),
                _extreme(numbers.masked_fill(~masks, torch.inf), "min"),
                _extreme(numbers.masked_fill(~masks, -torch.inf), "max"),
            ]
        )
        self._names = list(values)
        self._totals = new if self._totals is None else _merge(self._totals, new)

    def result(self, reduce: Reduce) -> dict[str, float]:
        """`name/avg`, `/min`, `/max` over all ranks; a name of which no token was seen is left out. Collective."""
        if self._totals is None:
            return {}
        sums, lows, highs = (
            reduce(self._totals[:2], "sum"),
            reduce(self._totals[2], "min"),
            reduce(self._totals[3], "max"),
        )
        found: dict[str, float] = {}
        rows = zip(self._names, sums[0].tolist(), sums[1].tolist(), lows.tolist(), highs.tolist(), strict=True)
        for name, total, count, low, high in rows:
            if count > 0:
                found |= {f"{name}/avg": total / count, f"{name}/min": low, f"{name}/max": high}
        return found


def loss_statistics(
    logp: Tensor, entropy: Tensor, tokens: PolicyTokens, loss: PolicyLoss, is_decoupled: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers of one micro-batch's tokens, with the mask over which each is averaged.

    Divergences are k3 estimates, never negative: of the three policies that made a token (behaviour), from which the
    step starts (proximal), and in training (current).
    """
    everything, logp = torch.ones_like(loss.kept), logp.detach()
    behaviour, prox = tokens.behaviour_logp, tokens.prox_logp
    log_ratio = logp - behaviour
    found = {
        "actor_loss": (loss.loss, everything),
        "importance_weight": (loss.ratio, everything),
        "approx_kl": (logp - prox, everything),
        "new_logp": (logp, everything),
        "old_logp": (behaviour, everything),
        "entropy": (entropy, everything),
        "clip_ratio": (loss.clipped, everything),
        "dual_clip_ratio": (loss.dual_clipped, everything),
        "clipped_new_logp": (logp, loss.clipped),
        "clipped_old_logp": (behaviour, loss.clipped),
        "compute_logp/kl_div_direct": (-log_ratio, everything),
        "compute_logp/kl_div_taylor": (log_ratio.square() / 2, everything),
        "compute_logp/kl_div_dual": (log_ratio.clamp(max=20).exp() - 1 - log_ratio, everything),
        "divergence/current_from_proximal": (approx_kl(logp, prox, "k3"), everything),
        "divergence/current_from_behaviour": (approx_kl(logp, behaviour, "k3"), everything),
    }
    if is_decoupled:
        found |= {
            "behave_imp_weight": (loss.behaviour_weight, loss.kept),
            "behave_imp_weight_squared": (loss.behaviour_weight.square(), loss.kept),
            "behave_approx_kl": (prox - behaviour, loss.kept),
            "rs_filtered_fraction": (~loss.kept, everything),
            "divergence/proximal_from_behaviour": (approx_kl(prox, behaviour, "k3"), everything),
        }
    return found


def mismatch_statistics(tokens: PolicyTokens, is_fresh: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """How far engine and trainer are apart on tokens that the very weights of this step have made ([m] bool).

    Nothing but precision, kernels and sampling settings can be the reason.
    """
    return {"engine_mismatch": ((tokens.prox_logp - tokens.behaviour_logp).abs(), is_fresh)}


def approximation_statistics(
    candidates: Mapping[str, Tensor], prox_logp: Tensor, behaviour_logp: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """How far stand-ins for the proximal log-probabilities are from the recomputed ones."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    everything = torch.ones_like(prox_logp, dtype=torch.bool)
    for name, candidate in candidates.items():
        error = prox_logp - candidate
        weight_error = (prox_logp - behaviour_logp).exp() - (candidate - behaviour_logp).exp()
        found |= {
            f"compute_logp/{name}/approx_logp": (candidate, everything),
            f"compute_logp/{name}/abs_error": (error.abs(), everything),
            f"compute_logp/{name}/squared_error": (error.square(), everything),
            f"compute_logp/{name}/behave_imp_weight_abs_error": (weight_error.abs(), everything),
        }
    return found


def batch_statistics(batch: SampleBatch, config: ActorConfig, version: int) -> dict[str, float]:
    """Numbers of the whole batch, before the update; every rank works out the same."""
    mask, lengths = batch.loss_mask, batch.lengths.double()
    generated = batch.versions != NO_VERSION
    num_generated = torch.zeros_like(lengths).index_add_(0, batch.sample_ids, generated.double())
    everyone = torch.ones_like(batch.no_eos)
    statistics = TokenStatistics()
    statistics.add(
        {
            "task_reward": (batch.rewards, everyone),
            "no_eos_ratios": (batch.no_eos, everyone),
            "prompt_len": (lengths - num_generated, everyone),
            "completion_len": (num_generated, everyone),
            "seq_len": (lengths, everyone),
            "correct_seq_len": (lengths, batch.rewards > 0),
            "incorrect_seq_len": (lengths, batch.rewards <= 0),
        }
        | ({"final_reward": (batch.final_rewards, everyone)} if batch.final_rewards is not None else {})
    )
    tokens = TokenStatistics()
    optional = {"advantages": batch.advantages, "kl_rewards": batch.kl_rewards}
    tokens.add({name: (value, mask) for name, value in optional.items() if value is not None})
    counts = {
        "n_seqs": float(batch.num_samples),
        "correct_n_seqs": float((batch.rewards > 0).sum()),
        "incorrect_n_seqs": float((batch.rewards <= 0).sum()),
        "n_tokens": float(batch.num_tokens),
        "n_valid_tokens": float(mask.sum()),
        "n_generated_tokens": float(generated.sum()),
        "n_invalid_tokens": float(batch.num_invalid_tokens),
        "eps_clip": config.eps_clip,
        "mask_no_eos_with_zero": float(config.mask_no_eos_with_zero),
        "use_dual_clip": float(config.c_clip is not None),
    }
    return counts | statistics.result(_alone) | tokens.result(_alone) | _staleness(batch, version)


def effective_sample_size(stats: Mapping[str, float]) -> dict[str, float]:
    """(sum w)^2 / (n sum w^2) of the behaviour weights, in (0, 1]: the part of the tokens that counts in effect."""
    mean, square = stats.get("behave_imp_weight/avg"), stats.get("behave_imp_weight_squared/avg")
    if mean is None or square is None or square == 0:
        return {}
    return {"effective_sample_size": mean * mean / square}


def _staleness(batch: SampleBatch, version: int) -> dict[str, float]:
    """Steps between making a token and training on it: extremes, average, and how many tokens of each age."""
    ages = (version - batch.versions[batch.loss_mask & (batch.versions != NO_VERSION)]).long()
    if len(ages) == 0:
        return {}
    found = {f"staleness_tokens/{age}": float(count) for age, count in enumerate(ages.clamp(min=0).bincount().tolist())}
    for name, shift in (("theta", 0), ("proximal", 1)):
        prefix = f"version_stats/sample_staleness_{name}"
        found[f"{prefix}_avg"] = float(ages.double().mean()) - shift
        found[f"{prefix}_max"] = float(ages.max()) - shift
        found[f"{prefix}_min"] = float(ages.min()) - shift
    return found


def _alone(x: Tensor, how: str) -> Tensor:
    """The reduction over one rank."""
    return x


def _extreme(x: Tensor, which: str) -> Tensor:
    """[K] the smallest or largest of each row; +-inf for rows without entries."""
    if x.shape[1] == 0:
        return x.new_full((x.shape[0],), torch.inf if which == "min" else -torch.inf)
    return x.amin(1) if which == "min" else x.amax(1)


def _merge(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a[0] + b[0], a[1] + b[1], torch.minimum(a[2], b[2]), torch.maximum(a[3], b[3])])
