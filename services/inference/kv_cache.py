"""Keep the keys and values of every slot in memory that is allocated once and written in place.

    keys[layer], values[layer]: [num_slots + 1, heads, capacity, head_dim]
                                        |
        slot 0..n-1 running | n.. idle, their prefixes may be reused | last: where padding is written

A forward pass first says which slots and positions its queries have (`place`); then the model's attention layers
call `update` as they do with any cache of transformers. Running slots are 0..n-1, so that decoding reads a view and
copies nothing. `capacity` doubles when a sequence outgrows it; pages that were never written take no memory.

Guarantee: what a masked position holds is finite, whatever was there before; `wipe` restores that after an overflow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache

INITIAL_CAPACITY = 64
"""Tokens per slot before the first growth."""
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the n queries of one forward pass write and read."""

    write_slots: torch.Tensor
    """[n, q] slot of each query token; `num_slots` for padding."""
    write_positions: torch.Tensor
    """[n, q] position of each query token in its slot."""
    read_slots: slice | torch.Tensor
    """The n slots attended to: a range is a view, a list is a copy."""
    read_length: int
    """Positions 0..read_length - 1 are attended to, under the mask."""


class SlotCache(Cache):
    """The keys and values of `num_slots` sequences, for transformers' models."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity = INITIAL_CAPACITY
        self._device = device
        self._tensors: list[list[torch.Tensor]] = []
        self._used = 0
        self._placement: Placement | None = None

    def place(self, slots: Slots, positions: torch.Tensor, is_padding: torch.Tensor | None) -> int:
        """Say where the next forward pass writes and reads; returns how many positions it attends to.

        Args:
            slots: [n].
            positions: [n, q] of each query token in its slot.
            is_padding: [n, q], or None where nothing is padding.
        """
        length = int(positions.max()) + 1
        self._reserve(length)
        first, count = int(slots[0]), len(slots)
        is_range = int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all())
        self._used = max(self._used, int(slots.max()) + 1)
        indices = torch.from_numpy(slots).to(self._device)
        writes = indices[:, None].expand_as(positions)
        if is_padding is not None:
            writes = writes.masked_fill(is_padding, self.num_slots)
        reads = slice(first, first + count) if is_range else indices
        self._placement = Placement(writes, positions, reads, length)
        return length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [n, heads, q, head_dim]; returns all that the n slots attend to."""
        place = self._placement
        if place is None:
            raise RuntimeError("SlotCache.place comes before a forward pass")
        if layer_idx == len(self._tensors):
            self._tensors.append([self._allocate(key_states), self._allocate(value_states)])
        keys, values = self._tensors[layer_idx]
        keys[place.write_slots, :, place.write_positions] = key_states.transpose(1, 2)
        values[place.write_slots, :, place.write_positions] = value_states.transpose(1, 2)
        return keys[place.read_slots, :, : place.read_length], values[place.read_slots, :, : place.read_length]

    @torch.inference_mode()
    def copy(self, sources: Slots, targets: Slots, length: int) -> None:
        """Copy the first `length` positions of some slots to others, all at once: an exchange is possible."""
        self._used = max(self._used, int(targets.max()) + 1)
        source, target = torch.from_numpy(sources), torch.from_numpy(targets)
        for tensor in self._all():
            tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def wipe(self, first_slot: int) -> None:
        """Zero the slots from `first_slot` on, which must be idle."""
        for tensor in self._all():
            tensor[first_slot:].zero_()

    def bytes_per_token(self) -> int:
        """What one position of one slot takes in all layers; known after the first forward pass."""
        return sum(tensor[0, :, 0].nbytes for tensor in self._all())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest sequence attended to in the present pass."""
        return self._placement.read_length if self._placement is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what is attended to."""
        return self.get_seq_length(layer_idx), 0

    def _all(self) -> list[torch.Tensor]:
        return [tensor for pair in self._tensors for tensor in pair]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = states.shape
        return torch.zeros(self.num_slots + 1, heads, self.capacity, dim, dtype=states.dtype, device=self._device)

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, max(2 * self.capacity, 1 << (length - 1).bit_length())
        for pair in self._tensors:
            for index, tensor in enumerate(pair):
                pair[index] = self._allocate(tensor)
                pair[index][: self._used, :, :old] = tensor[: self._used]
