"""Choose the next token of many rows at once, each by its own parameters, and give its log-probability.

    logits -> penalties, bias, minimum length -> / temperature -> log-softmax -> top-k, top-p, min-p -> choose
                                                                       |
                                                          the log-probability that is reported

Guarantee: which token a row gets depends only on its logits, its parameters, its seed and its position, never on
which rows run beside it. A request that is interrupted and continued goes on with the same random numbers.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from services.inference.rows import Rows, SlotTable

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def sample(logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each slot.

    Args:
        logits: [n, vocab] float32; changed in place. Called in inference mode.
        slots: [n], the slots of the rows.

    Returns:
        Token ids [n] int64 and their log-probabilities [n] float32, on the CPU.
    """
    rows = table.rows[slots]
    _change_logits(logits, table, slots, rows)
    if (rows["temperature"] != 1).any():
        logits /= _column(rows["temperature"], logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    uniform = _column(uniforms(rows["seed"], rows["length"]), logits)
    tokens = _choose(logprobs, rows, uniform)
    return tokens.cpu(), logprobs.gather(1, tokens[:, None])[:, 0].cpu()


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniform numbers in [0, 1), one for each seed and position (the SplitMix64 generator's output function)."""
    state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    state ^= state >> np.uint64(31)
    numbers: NDArray[np.float32] = (state >> np.uint64(41)).astype(np.float32) * np.float32(2**-23)
    return numbers


def _choose(logprobs: torch.Tensor, rows: Rows, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [n] by inverting the cumulative distribution at `uniform` [n, 1]."""
    if (rows["top_k"] == 1).all():
        return logprobs.argmax(-1)
    filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
    probs = logprobs.exp()
    if filtered.any():
        which = torch.from_numpy(np.flatnonzero(filtered)).to(probs.device)
        probs[which] = _filtered(probs[which], rows[filtered])
    cumulative = probs.cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def _filtered(probs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Zero what top-k, top-p and min-p leave out; top-p counts the probability before top-k, as SGLang does."""
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    limit = np.where(rows["top_k"] > 0, rows["top_k"], probs.shape[1])
    out = rank >= torch.from_numpy(limit).to(probs.device)[:, None]
    out |= ordered.cumsum(-1) - ordered > _column(rows["top_p"], probs)
    out |= ordered < ordered[:, :1] * _column(rows["min_p"], probs)
    return torch.zeros_like(probs).scatter_(1, order, ordered.masked_fill_(out, 0.0))


def _change_logits(logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int64], rows: Rows) -> None:
    for index in np.flatnonzero(rows["is_special"]):
        request = table.request(int(slots[index]))
        params, row = request.params, rows[index]
        start, end = int(row["start"]), int(row["length"])
        _penalise(logits[index], table.tokens[slots[index], start:end], row)
        for token, bias in params.logit_bias.items():
            logits[index, token] += bias
        if end - start < params.min_new_tokens:
            logits[index, list(request.all_stop_ids)] = -torch.inf


def _penalise(logits: torch.Tensor, output: NDArray[np.int64], row: Rows) -> None:
    """Apply the penalties for the tokens that were generated, to the logits [vocab] of one row."""
    seen, counts = np.unique(output, return_counts=True)
    index = torch.from_numpy(seen).to(logits.device)
    values = logits[index] - float(row["frequency_penalty"]) * torch.from_numpy(counts).to(logits.device)
    values -= float(row["presence_penalty"])
    scale = float(row["repetition_penalty"])
    logits[index] = torch.where(values < 0, values * scale, values / scale)


def _column(values: NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    """[n] -> [n, 1] where `like` lives."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)[:, None]
