"""Log-probabilities and entropy of chosen tokens from hidden states, without a float32 [rows, vocabulary] tensor.

The output layer is applied to a chunk of rows at a time; the backward pass recomputes a chunk's logits instead of
keeping them. Only a small problem (a toy vocabulary, a few rows) keeps its probabilities: there memory is no matter.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.algorithm.products import product

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at a time: 64 MiB in float32."""
KEPT_ELEMENTS = 1 << 22
"""Up to so many, probabilities are kept for the backward pass."""


class TokenLogprobs(NamedTuple):
    """[m] float32 each."""

    logp: Tensor
    """Of the target; differentiable."""
    uniform_logp: Tensor
    """Mean over the vocabulary, for label smoothing; differentiable."""
    entropy: Tensor
    """In nats; without gradient."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> TokenLogprobs:
    """Score targets [m] under softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden: [m, H].
        weight: [V, H], the output layer.
        bias: [V] or None.
    """
    return TokenLogprobs(*_TokenLogprobs.apply(hidden, weight, bias, targets, temperature))  # type: ignore[no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, is_small = _rows_per_chunk(weight), hidden.shape[0] * weight.shape[0] <= KEPT_ELEMENTS
        kept, results = None, []
        for h, y in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            scores, probabilities = _score(_logits(h, weight, bias, temperature), y)
            kept = probabilities if is_small else None
            results.append(scores)
        logp, uniform, entropy, normaliser = (torch.cat(column) for column in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, kept)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, uniform, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, kept = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        rows = _rows_per_chunk(weight)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            if kept is None:
                logits = _logits(hidden[part], weight, bias, ctx.temperature)
                probabilities = logits.sub_(normaliser[part, None]).exp_()
            else:
                probabilities = kept
            d_logits = _logit_gradient(probabilities, targets[part], gradients[0][part], gradients[1][part])
            d_logits = d_logits.div_(ctx.temperature).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = product(d_logits, weight.t(), is_packed=False)
            if d_weight is not None:
                d_weight += product(d_logits.t(), hidden[part].t(), is_packed=False)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, None, None


def _score(logits: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Log-probability, uniform log-probability, entropy, normaliser, [rows] each; and probabilities [rows, V]."""
    normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    probabilities = (logits - normaliser[:, None]).exp_()
    entropy = normaliser - torch.einsum("mv,mv->m", probabilities, logits)
    return (logp, logits.mean(-1) - normaliser, entropy, normaliser), probabilities


def _rows_per_chunk(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[rows, V] float32."""
    logits = product(hidden, weight, bias, is_packed=False).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _logit_gradient(probabilities: Tensor, targets: Tensor, d_logp: Tensor, d_uniform: Tensor) -> Tensor:
    """[rows, V]: d_logp * (onehot - p) + d_uniform * (1 / V - p)."""
    gradient = probabilities * -(d_logp + d_uniform)[:, None]
    gradient += (d_uniform / probabilities.shape[-1])[:, None]
    return gradient.scatter_add_(1, targets[:, None], d_logp[:, None])
