"""From the samples of a batch to what one forward pass is given, with no row computed twice or in vain.

Decides, for a list of samples: which tokens need a row, which rows samples share, and which row predicts which token.

- A row is only computed up to the one that predicts a sample's last token in the loss; a sample without one has none.
- Samples that begin alike (the prompt of a group, and as far as completions agree) share the rows of what is alike:
  the hidden state of a token depends on the tokens before it only, so it is the same number for all of them, and its
  gradient is the sum. With 8 samples of a prompt as long as the completion this halves the work.

`packed` lays rows end to end for `PackedAttention`. `padded` gives one line per sample, filled up on the right, for any
attention of transformers: under a causal mask what stands on the right is never seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.algorithm.batch import SampleBatch
from services.trainer.attention import PackedAttention

SHORTEST_SHARED = 8
"""A common beginning shorter than this is not worth an attention mask."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass, and what is asked of it; R rows, m scored tokens."""

    input_ids: Tensor
    """[1, R] packed, or [n, L] padded."""
    position_ids: Tensor
    attention: PackedAttention | None
    """None: padded."""
    predictors: Tensor
    """[m] the row, counted over the flattened input, whose output predicts each scored token."""
    targets: Tensor
    """[m] token ids."""
    tokens: Tensor
    """[m] where each scored token lies in the batch's flat tensors, sample after sample. On the CPU."""

    @property
    def num_rows(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(
            self.input_ids.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.attention.to(device) if self.attention is not None else None,
            self.predictors.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.tokens,
        )


@dataclass(frozen=True, slots=True)
class Prefix:
    """A sample as the forward pass sees it: its tokens up to the last row that is needed."""

    sample: int
    start: int
    """Of the sample in the batch's flat tensors."""
    ids: Ints
    """[rows needed], may be empty."""

    @property
    def sort_key(self) -> bytes:
        """Orders samples by their token ids."""
        return self.ids.astype(">i8").tobytes()


def prefixes(batch: SampleBatch) -> list[Prefix]:
    """Each sample's part that needs rows."""
    ids, mask = batch.input_ids.numpy(), batch.loss_mask.numpy()
    found = []
    for sample, (start, length) in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)):
        scored = np.flatnonzero(mask[start : start + length])
        needed = int(scored[-1]) if len(scored) else 0
        found.append(Prefix(sample, start, ids[start : start + needed]))
    return found


def shared_lengths(ordered: Sequence[Prefix]) -> list[int]:
    """For prefixes in the order of `sort_key`: how many rows each can take over from the one before it."""
    shared = [0] * len(ordered)
    for i in range(1, len(ordered)):
        common = _common(ordered[i - 1].ids, ordered[i].ids)
        shared[i] = common if common >= SHORTEST_SHARED else 0
    return shared


def num_rows(members: Sequence[Prefix], *, is_shared: bool) -> int:
    """Rows that these samples need together."""
    total = sum(len(member.ids) for member in members)
    return total - sum(shared_lengths(sorted(members, key=lambda m: m.sort_key))) if is_shared else total


def packed(batch: SampleBatch, members: Sequence[Prefix]) -> MicroBatch:
    """Rows end to end, common beginnings once."""
    ordered = sorted((member for member in members if len(member.ids)), key=lambda m: m.sort_key)
    if not ordered:
        return _nothing(is_packed=True)
    shared, num = shared_lengths(ordered), 0
    paths: list[Ints] = []
    for member, common in zip(ordered, shared, strict=True):
        own = np.arange(num, num + len(member.ids) - common)
        paths.append(np.concatenate([paths[-1][:common], own]) if common else own)
        num += len(own)
    ids = np.concatenate([member.ids[common:] for member, common in zip(ordered, shared, strict=True)])
    positions = np.concatenate([np.arange(c, len(m.ids)) for m, c in zip(ordered, shared, strict=True)])
    owners = [i for i, path in enumerate(paths) if len(path) > shared[i]]
    attention = PackedAttention([shared[i] for i in owners], [paths[i] for i in owners])
    return _micro_batch(batch, ordered, paths, ids[None], positions[None], attention)


def padded(batch: SampleBatch, members: Sequence[Prefix]) -> MicroBatch:
    """One line per sample, filled up on the right."""
    present = sorted((member for member in members if len(member.ids)), key=lambda m: m.sample)
    if not present:
        return _nothing(is_packed=False)
    longest = max(len(member.ids) for member in present)
    ids = np.stack([np.pad(member.ids, (0, longest - len(member.ids))) for member in present])
    positions = np.broadcast_to(np.arange(longest), ids.shape)
    paths = [i * longest + np.arange(len(member.ids)) for i, member in enumerate(present)]
    return _micro_batch(batch, present, paths, ids, positions, None)


def _micro_batch(
    batch: SampleBatch,
    members: Sequence[Prefix],
    paths: Sequence[Ints],
    ids: Ints,
    positions: Ints,
    attention: PackedAttention | None,
) -> MicroBatch:
    mask = batch.loss_mask.numpy()
    predictors, tokens = [], []
    for member, path in zip(members, paths, strict=True):
        scored = np.flatnonzero(mask[member.start : member.start + len(path) + 1])
        predictors.append(path[scored - 1])
        tokens.append(member.start + scored)
    flat = torch.from_numpy(np.concatenate(tokens))
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(ids)),
        position_ids=torch.from_numpy(np.ascontiguousarray(positions)),
        attention=attention,
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=batch.input_ids[flat],
        tokens=flat,
    )


def _nothing(*, is_packed: bool) -> MicroBatch:
    """One row that predicts nothing: what a rank computes while others still have samples."""
    zero, none = torch.zeros((1, 1), dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    attention = PackedAttention([0], [np.zeros(1, dtype=np.int64)]) if is_packed else None
    return MicroBatch(zero, zero, attention, none, none, none)


def _common(a: Ints, b: Ints) -> int:
    """Length of the common beginning."""
    least = min(len(a), len(b))
    different = np.flatnonzero(a[:least] != b[:least])
    return int(different[0]) if len(different) else least
