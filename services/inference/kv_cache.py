"""Keep the keys and values of every slot in memory that is written in place.

    keys[layer], values[layer]: [num_slots, heads, capacity, head_dim]

Running slots are 0..n-1, so that decoding reads a view of them and copies nothing. `capacity` stays close to the
longest sequence, because attention over rows with gaps between them is half as fast on a CPU: when a sequence outgrows
it, everything is copied once, every sixteen tokens or more.

Guarantee: positions that were never written are zero, so that what a mask hides is finite; `wipe` restores that after
an overflow.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache

GRANULE = 16
"""The capacity is a multiple of this."""
Slots = NDArray[np.int64]


class SlotCache(Cache):
    """The keys and values of `num_slots` sequences, for transformers' models."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity = GRANULE
        self._device = device
        self._tensors: list[list[torch.Tensor]] = []
        self._used = 0
        self._slots = self._positions = torch.zeros(0, dtype=torch.long)

    def place(self, slots: torch.Tensor, positions: torch.Tensor, num_slots: int, length: int) -> None:
        """Say where the next forward pass writes its T tokens.

        Args:
            slots: [T] slot of each token.
            positions: [T] position of each token in its slot.
            num_slots: One more than the highest slot.
            length: One more than the highest position.
        """
        self._slots, self._positions = slots, positions
        self._used = max(self._used, num_slots)
        if length > self.capacity:
            self._grow(-(-(length + length // 8) // GRANULE) * GRANULE)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`write`, as transformers' models call it: with keys and values [1, heads, T, head_dim]."""
        return self.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [T, heads, head_dim] of one layer; returns those of all slots."""
        if layer == len(self._tensors):
            self._tensors.append([self._allocate(keys), self._allocate(values)])
        all_keys, all_values = self._tensors[layer]
        all_keys[self._slots, :, self._positions] = keys
        all_values[self._slots, :, self._positions] = values
        return all_keys, all_values

    def read_length(self, length: int) -> int:
        """How many positions to read for sequences of up to `length`: all of them where few are wasted."""
        return self.capacity if self.capacity <= length + length // 8 + GRANULE else length

    def copy(self, sources: Slots, targets: Slots, length: int) -> None:
        """Copy the first `length` positions of some slots to others, all at once: an exchange is possible."""
        self._used = max(self._used, int(targets.max()) + 1)
        source, target = torch.from_numpy(sources), torch.from_numpy(targets)
        for tensor in self._all():
            tensor[target, :, :length] = tensor[source, :, :length]

    def wipe(self, first_slot: int) -> None:
        """Zero the slots from `first_slot` on, which must be idle."""
        for tensor in self._all():
            tensor[first_slot : self._used].zero_()

    def bytes_per_token(self) -> int:
        """What one position of one slot takes in all layers; known after the first forward pass."""
        return sum(tensor[0, :, 0].nbytes for tensor in self._all())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that exist."""
        return self.capacity

    def _all(self) -> list[torch.Tensor]:
        return [tensor for pair in self._tensors for tensor in pair]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        """Zeros for all slots, with the heads and sizes of `states` [anything, heads, ..., head_dim]."""
        heads, dim = states.shape[1], states.shape[-1]
        return torch.zeros(self.num_slots, heads, self.capacity, dim, dtype=states.dtype, device=self._device)

    def _grow(self, capacity: int) -> None:
        old, self.capacity = self.capacity, capacity
        for pair in self._tensors:
            for index, tensor in enumerate(pair):
                pair[index] = self._allocate(tensor)
                pair[index][: self._used, :, :old] = tensor[: self._used]
