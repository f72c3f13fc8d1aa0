"""Attention of one forward pass over slots of different lengths, as an attention function of transformers.

A pass takes the tokens of all slots in one row, [1, T]: first one token for each slot that decodes, then the prompt
tokens that are due. So every layer but attention works on exactly T tokens. Here they are taken apart again:

    tokens   d d d d d | p p p p p p | p p p          d: decoding   p: prompts, of different lengths
    parts    [5, 1]      [2, 6], padded               each with its mask, over its slots' keys and values

Query heads that share a key-value head are laid side by side as more queries, so that keys and values are never copied.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from headway.errors import InvalidInput

NAME = "headway_slots"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that change the scores, which this one does not do."""


@dataclass(frozen=True)
class Part:
    """m slots that attend together, with q queries each."""

    tokens: slice
    """Their tokens in the row."""
    slots: slice | torch.Tensor
    """A range is a view of the cache, a list [m] a copy."""
    positions: torch.Tensor
    """[m, q] position of each query in its slot; 0 for padding."""
    length: int
    """Positions 0..length - 1 are read."""
    pad: torch.Tensor | None = None
    """[m, q] which of the part's tokens each query is; None: they are in order, q for each slot."""
    unpad: torch.Tensor | None = None
    """[number of tokens] which of the m * q queries each token is."""
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """[m, 1, repeats * q, length]: 0 where a query sees a position, -inf elsewhere; made once a pass."""
        key = (window, repeats)
        if key not in self._masks:
            distance = self.positions[:, None, :, None] - torch.arange(self.length, device=self.positions.device)
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            zero = torch.zeros((), dtype=dtype, device=hidden.device)
            mask = zero.masked_fill(hidden, -torch.inf)
            self._masks[key] = mask.repeat(1, 1, repeats, 1) if mask.shape[2] > 1 and repeats > 1 else mask
        return self._masks[key]


class Pass(threading.local):
    """The parts of the forward pass that this thread is in."""

    parts: tuple[Part, ...] = ()


current = Pass()


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries [1, heads, T, dim] over the cache's keys and values; returns [1, T, heads, dim].

    Raises:
        InvalidInput: The model wants something that this function does not do.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise InvalidInput(f"attention with {name} is not done by the built-in engine; use SGLang or vLLM")
    return attend(query[0].transpose(0, 1), key, value, scaling, sliding_window)[None], None


def attend(
    queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attention of queries [T, heads, dim] over the cache's keys and values; returns [T, heads, dim]."""
    outputs = [_attend(part, queries[part.tokens], key, value, scaling, window) for part in current.parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    part: Part,
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of one part's queries [tokens, heads, dim]."""
    (num_rows, width), (_, heads, dim), kv_heads = part.positions.shape, queries.shape, key.shape[1]
    repeats = heads // kv_heads
    if part.pad is not None:
        queries = queries[part.pad]
    if width > 1:
        queries = queries.view(num_rows, width, kv_heads, repeats, dim).permute(0, 2, 3, 1, 4)
    output = _attention(width)(
        queries.reshape(num_rows, kv_heads, repeats * width, dim),
        key[part.slots, :, : part.length],
        value[part.slots, :, : part.length],
        attn_mask=part.mask(window, repeats, queries.dtype),
        scale=dim**-0.5 if scaling is None else scaling,
    )
    if width > 1:
        output = output.view(num_rows, heads, width, -1).transpose(1, 2)
    flat = output.reshape(num_rows * width, heads, -1)
    return flat if part.unpad is None else flat[part.unpad]


def _attention(width: int) -> Callable[..., torch.Tensor]:
    """The faster way for `width` queries a slot."""
    return decoding_attention if width == 1 else scaled_dot_product_attention


def decoding_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`scaled_dot_product_attention` for few queries, whose kernel for CPUs takes twice as long on cold memory."""
    scores = torch.bmm((query * scale).flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    weights = scores.view(*query.shape[:3], -1).add_(attn_mask).softmax(-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(*query.shape[:3], -1)


AttentionInterface.register(NAME, slot_attention)
