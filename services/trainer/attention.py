"""Attention over samples laid end to end in one row, where samples may share the rows of a common prefix.

Each sample is a run of its own rows plus, before it, the rows of a prefix that an earlier sample owns:

    rows      p p p p a a a b b c c c          sample 0 = p p p p a a a     owns p p p p a a a
                                               sample 1 = p p p p b b       owns b b, its path is p p p p b b
    query     own rows of the sample           sample 2 = p p p p c c c     owns c c c
    keys      the whole path, causally

Rows of other samples are never among a sample's keys: nothing can be seen across samples. transformers' models call
`packed_attention` in place of their own attention (it is registered under `ATTENTION`), and everything around it (the
matrix products) runs on exactly the rows there are, without padding.

CUDA in half precision takes flash attention over the ragged runs; everything else takes `scaled_dot_product_attention`
over buckets of samples of similar length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headway.errors import InvalidInput

ATTENTION = "headway_packed"
BUCKET_RATIO = 0.75
"""The shortest sample of a bucket is at least this part of the longest..."""
BUCKET_SLACK = 16
"""...or so many tokens shorter."""
MASK_ELEMENTS = 1 << 24
"""Largest mask of a bucket with more than one sample."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples of similar shape, padded to [B, Q] queries and [B, K] keys."""

    queries: Tensor
    """[B * Q] rows; a short sample repeats its last one."""
    keys: Tensor
    """[B * K] rows; a short sample repeats its last one."""
    shape: tuple[int, int, int]
    """B, Q, K."""
    shared: Tensor
    """[B] length of the prefix that another sample owns."""
    own: Tensor
    """[B] rows of the sample's own."""

    def mask(self, window: int | None) -> Tensor | None:
        """[B, 1, Q, K] true where a query may look; None: plain causal, no prefix."""
        _, num_queries, num_keys = self.shape
        if window is None and not bool(self.shared.any()):
            return None
        device = self.queries.device
        inside = torch.arange(num_queries, device=device).minimum(self.own[:, None] - 1)
        position = (self.shared[:, None] + inside)[:, None, :, None]
        key = torch.arange(num_keys, device=device)
        return (key <= position) if window is None else (key <= position) & (key > position - window)


class PackedAttention:
    """Which rows each sample's queries and keys are; built once for a micro-batch, used by every layer.

    Args:
        shared: [n] length of the prefix of each sample that is owned by another one.
        paths: n arrays of rows, prefix first; the rows after it are the sample's own, at least one, and follow those
            of the sample before it.
    """

    def __init__(self, shared: Sequence[int], paths: Sequence[NDArray[np.int64]]) -> None:
        self._shared, self._paths = list(shared), list(paths)
        self._device = torch.device("cpu")
        self._buckets: list[Bucket] | None = None
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor | None] = {}
        self._inverse = torch.empty(0)
        self._runs: tuple[Tensor | None, Tensor, Tensor, int, int] | None = None

    def to(self, device: torch.device) -> "PackedAttention":
        """The same, with indices on `device`."""
        self._device = device
        return self

    def padded(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], window: int | None) -> Tensor:
        """[R, H, D] attention by buckets; query [R, H, D], key and value [R, Hkv, D]."""
        outputs = []
        for number, bucket in enumerate(self._all_buckets()):
            b, q, k = bucket.shape
            mask = self._mask(number, bucket, window, query.dtype)
            attended = F.scaled_dot_product_attention(
                query.index_select(0, bucket.queries).view(b, q, *query.shape[1:]).transpose(1, 2),
                key.index_select(0, bucket.keys).view(b, k, *key.shape[1:]).transpose(1, 2),
                value.index_select(0, bucket.keys).view(b, k, *value.shape[1:]).transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
                **options,
            )
            outputs.append(attended.transpose(1, 2).reshape(b * q, *query.shape[1:]))
        return torch.cat(outputs).index_select(0, self._inverse)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """[R, H, D] flash attention over the ragged runs; half precision on CUDA only."""
        rows, bounds, key_bounds, longest, longest_keys = self._all_runs()
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        window_size = (-1 if window is None else window - 1, 0)
        limits: dict[str, Any] = {"scale": scale, "window_size": window_size, "enable_gqa": True}
        attended = varlen_attn(query, key, value, bounds, key_bounds, longest, longest_keys, **limits)
        assert isinstance(attended, Tensor)
        return attended

    def _all_runs(self) -> tuple[Tensor | None, Tensor, Tensor, int, int]:
        """Key rows (None: all, in order), bounds of the runs of queries and of keys, and the longest of each."""
        if self._runs is None:
            totals = [len(path) for path in self._paths]
            own = [total - shared for total, shared in zip(totals, self._shared, strict=True)]
            rows = torch.from_numpy(np.concatenate(self._paths)).to(self._device) if any(self._shared) else None
            self._runs = (rows, self._bounds(own), self._bounds(totals), max(own), max(totals))
        return self._runs

    def _bounds(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self._device)

    def _mask(self, number: int, bucket: Bucket, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The additive mask of a bucket; the same for all layers."""
        key = (number, window, dtype)
        if key not in self._masks:
            allowed = bucket.mask(window)
            blocked = torch.zeros((), dtype=dtype, device=self._device)
            self._masks[key] = None if allowed is None else torch.where(allowed, blocked, -torch.inf)
        return self._masks[key]

    def _all_buckets(self) -> list[Bucket]:
        if self._buckets is None:
            self._buckets = []
            places = np.empty(sum(len(p) - s for p, s in zip(self._paths, self._shared, strict=True)), dtype=np.int64)
            offset = 0
            for members in _buckets(self._shared, [len(path) for path in self._paths]):
                bucket, own_rows = self._bucket(members)
                places[own_rows] = offset + _own_places(bucket)
                self._buckets.append(bucket)
                offset += bucket.shape[0] * bucket.shape[1]
            self._inverse = torch.from_numpy(places).to(self._device)
        return self._buckets

    def _bucket(self, members: list[int]) -> tuple[Bucket, NDArray[np.int64]]:
        """The bucket, and the rows that its samples own, sample after sample."""
        paths, shared = [self._paths[m] for m in members], np.array([self._shared[m] for m in members])
        own = [path[s:] for path, s in zip(paths, shared, strict=True)]
        queries, keys = _padded(own), _padded(paths)
        bucket = Bucket(
            queries=torch.from_numpy(queries.reshape(-1)).to(self._device),
            keys=torch.from_numpy(keys.reshape(-1)).to(self._device),
            shape=(len(members), queries.shape[1], keys.shape[1]),
            shared=torch.from_numpy(shared).to(self._device),
            own=torch.tensor([len(rows) for rows in own], device=self._device),
        )
        return bucket, np.concatenate(own)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedAttention,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, R, D], key and value [1, Hkv, R, D] -> [1, R, H, D].

    Raises:
        InvalidInput: The model's attention has something that is not known here.
    """
    unknown = [name for name in ("softcap", "s_aux") if others.get(name) is not None]
    if unknown or not getattr(module, "is_causal", True):
        raise InvalidInput(f"{type(module).__name__} is not plain causal attention: set actor.attn_impl to `eager`")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0:
        attended = packed.varlen(q, k, v, scale, sliding_window)
    else:
        attended = packed.padded(q, k, v, {"scale": scale, "dropout_p": dropout}, sliding_window)
    return attended.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)


def _buckets(shared: Sequence[int], totals: Sequence[int]) -> list[list[int]]:
    """Samples of similar length together; those without a shared prefix apart, because they need no mask."""
    found: list[list[int]] = []
    for has_prefix in (False, True):
        members = [i for i in range(len(totals)) if (shared[i] > 0) is has_prefix]
        members.sort(key=lambda i: -totals[i])
        current: list[int] = []
        for i in members:
            if current and not _fits(current, i, shared, totals):
                found.append(current)
                current = []
            current.append(i)
        if current:
            found.append(current)
    return found


def _fits(bucket: list[int], i: int, shared: Sequence[int], totals: Sequence[int]) -> bool:
    longest = totals[bucket[0]]
    if totals[i] < min(BUCKET_RATIO * longest, longest - BUCKET_SLACK):
        return False
    most_queries = max(totals[j] - shared[j] for j in (*bucket, i))
    return shared[i] == 0 or (len(bucket) + 1) * most_queries * longest <= MASK_ELEMENTS


def _padded(runs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """[n, longest]: each run, its last entry repeated."""
    padded = np.empty((len(runs), max(len(run) for run in runs)), dtype=np.int64)
    for row, run in zip(padded, runs, strict=True):
        row[: len(run)], row[len(run) :] = run, run[-1]
    return padded


def _own_places(bucket: Bucket) -> NDArray[np.int64]:
    """Where, in the bucket's padded output, the rows lie that its samples own."""
    num_samples, num_queries, _ = bucket.shape
    inside = np.arange(num_queries) < bucket.own.cpu().numpy()[:, None]
    return np.arange(num_samples * num_queries)[inside.reshape(-1)]
