"""One optimizer step: forward and backward over the micro-batches of this rank, then all or nothing.

The loss of a mini-batch is the sum over its tokens, on all ranks, over their number; FSDP2 averages gradients over
ranks, which is undone. A rule that looks at a whole mini-batch (M2PO) is applied before the cut, on all ranks alike.

Guarantee: where the loss or the gradient is not finite on any rank, no rank moves parameters or moments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithm.advantages import old_logp
from headway.algorithm.batch import SampleBatch
from headway.algorithm.losses import PolicyTokens, policy_loss
from headway.algorithm.proximal import approximations, second_moment_mask
from headway.algorithm.statistics import (
    TokenStatistics,
    approximation_statistics,
    loss_statistics,
    mismatch_statistics,
)
from headway.config.actor import ActorConfig
from services.trainer.distributed import Ranks
from services.trainer.layout import MicroBatch
from services.trainer.model import Policy
from services.trainer.optimization import Optimization
from services.trainer.plan import MiniBatch


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of one optimizer step."""

    loss: float
    """Mean over the tokens in the loss; may be no number."""
    grad_norm: float
    """Before clipping; may be no number."""
    applied: bool
    """False: nothing was changed."""


class Updater:
    """Moves a policy. Every rank calls the same methods with the same batches."""

    def __init__(self, policy: Policy, config: ActorConfig, ranks: Ranks) -> None:
        self._policy, self._config, self._ranks = policy, config, ranks

    def policy_step(
        self,
        minibatch: MiniBatch,
        batch: SampleBatch,
        version: int,
        optimization: Optimization,
        statistics: TokenStatistics,
        kept_logp: Tensor | None = None,
    ) -> Moved:
        """One step of the configured objective. Without `prox_logp`, the current policy is the proximal one.

        Args:
            kept_logp: [T] on the CPU; gets the log-probs of this rank's tokens as the forward pass gives them.
        """
        self._policy.train()
        total, kept = self._kept_tokens(minibatch, batch)
        loss_sum = torch.zeros((), device=self._ranks.device)
        for micro_batch in minibatch.micro_batches:
            scored = self._policy(micro_batch.to(self._ranks.device))
            if kept_logp is not None:
                kept_logp[micro_batch.tokens] = scored.logp.detach().float().cpu()
            tokens = self._policy_tokens(micro_batch, batch, kept, scored.logp, version)
            found = policy_loss(scored.logp, tokens, self._config)
            self._backward(found.loss.sum(), total)
            loss_sum += found.loss.detach().sum()
            is_decoupled = self._config.use_decoupled_loss
            numbers = loss_statistics(scored.logp, scored.entropy, tokens, found, is_decoupled=is_decoupled)
            if is_decoupled and self._config.prox_logp_method != "loglinear":
                is_fresh = batch.versions[micro_batch.tokens] == version
                numbers |= mismatch_statistics(tokens, is_fresh.to(self._ranks.device))
            if is_decoupled and self._config.prox_logp_method == "metrics":
                numbers |= self._approximations(micro_batch, batch, tokens, scored.logp, version)
            statistics.add(numbers)
        return self._move(loss_sum, total, optimization)

    def supervised_step(
        self, micro_batches: Sequence[MicroBatch], total: int, label_smoothing: float, optimization: Optimization
    ) -> Moved:
        """One step of cross-entropy on `total` tokens, of which this rank has those of its micro-batches."""
        self._policy.train()
        loss_sum = torch.zeros((), device=self._ranks.device)
        for micro_batch in micro_batches:
            scored = self._policy(micro_batch.to(self._ranks.device))
            losses = -(1 - label_smoothing) * scored.logp - label_smoothing * scored.uniform_logp
            self._backward(losses.sum(), total)
            loss_sum += losses.detach().sum()
        return self._move(loss_sum, total, optimization)

    def _backward(self, loss_sum: Tensor, total: int) -> None:
        (loss_sum * (self._ranks.data_size / max(total, 1))).backward()  # type: ignore[no-untyped-call]

    def _move(self, loss_sum: Tensor, total: int, optimization: Optimization) -> Moved:
        loss = float(self._ranks.reduce(loss_sum, "sum")) / max(total, 1)
        if not math.isfinite(loss) or total == 0:
            optimization.optimizer.zero_grad(set_to_none=True)
            return Moved(loss, math.nan, applied=False)
        return Moved(loss, *optimization.update())

    def _kept_tokens(self, minibatch: MiniBatch, batch: SampleBatch) -> tuple[int, Tensor]:
        """Tokens in the loss of a mini-batch, and [T] bool which of them M2PO keeps."""
        chosen = torch.zeros(batch.num_samples, dtype=torch.bool)
        chosen[list(minibatch.samples)] = True
        mine = chosen[batch.sample_ids] & batch.loss_mask
        if self._config.m2_threshold is None:
            return int(mine.sum()), mine
        if batch.prox_logp is None:
            raise ValueError("M2PO needs a batch with prox_logp")
        kept = second_moment_mask(batch.logprobs[mine], batch.prox_logp[mine], self._config.m2_threshold)
        return int(mine.sum()), mine.masked_scatter(mine, kept)

    def _policy_tokens(
        self, micro_batch: MicroBatch, batch: SampleBatch, kept: Tensor, logp: Tensor, version: int
    ) -> PolicyTokens:
        if batch.advantages is None:
            raise ValueError("the batch has no advantages: call compute_advantages first")
        where, device = micro_batch.tokens, self._ranks.device
        behaviour = old_logp(batch, self._config)[where].to(device)
        prox = behaviour
        if self._config.use_decoupled_loss and self._config.prox_logp_method == "loglinear":
            prox = approximations(logp, behaviour, batch.versions[where].to(device), version)["loglinear"]
        elif self._config.use_decoupled_loss:
            prox = logp.detach() if batch.prox_logp is None else batch.prox_logp[where].to(device)
        return PolicyTokens(
            behaviour_logp=behaviour,
            prox_logp=prox,
            advantages=batch.advantages[where].to(device),
            sample_ids=batch.sample_ids[where].to(device),
            kept=kept[where].to(device),
        )

    def _approximations(
        self, micro_batch: MicroBatch, batch: SampleBatch, tokens: PolicyTokens, logp: Tensor, version: int
    ) -> dict[str, tuple[Tensor, Tensor]]:
        versions = batch.versions[micro_batch.tokens].to(self._ranks.device)
        candidates = approximations(logp, tokens.behaviour_logp, versions, version)
        return approximation_statistics(candidates, tokens.prox_logp, tokens.behaviour_logp)
