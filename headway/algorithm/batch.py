"""The samples of one train step, laid end to end, and how tokens, samples and groups are told apart.

What belongs to a token is a flat tensor [T], T = the sum of the lengths: no padding exists that could be trained on.
Values belong to the token itself and are not shifted: `logprobs[i]` is the log-probability of token i given the tokens
before it, and `loss_mask[i]` says whether that probability carries gradient. The first token of a sample has nothing
before it and never does.

Guarantee: a batch made by `from_groups` holds only finite numbers. A token whose log-probability is not finite, and
every token of a sample whose reward is not finite, carries no gradient and is counted in `num_invalid_tokens`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core.trajectory import Group, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """N samples of G groups. Tensors are on the CPU and are not changed in place."""

    lengths: Tensor
    """[N] int64, tokens of each sample."""
    input_ids: Tensor
    """[T] int64."""
    logprobs: Tensor
    """[T] float32, under the policy that generated the token (behaviour); 0 elsewhere."""
    loss_mask: Tensor
    """[T] bool."""
    versions: Tensor
    """[T] int32, step of the version that generated the token; NO_VERSION elsewhere."""
    rewards: Tensor
    """[N] float32, as the reward function gave them."""
    group_ids: Tensor
    """[N] int64, 0 to G - 1; samples of one task share it."""
    no_eos: Tensor
    """[N] bool, generation ended because the budget was used up."""
    task_ids: tuple[str, ...] = ()
    """[G] names for messages."""
    num_invalid_tokens: int = 0
    """Tokens taken out of the loss because their evidence was not finite."""
    prox_logp: Tensor | None = None
    """[T] float32, under the policy at the start of the step (proximal); None until computed."""
    ref_logp: Tensor | None = None
    """[T] float32, under the reference model; None without one."""
    kl_rewards: Tensor | None = None
    """[T] float32, the penalty for leaving the reference model; None until advantages are computed."""
    final_rewards: Tensor | None = None
    """[N] float32, rewards after penalty, scaling, clipping and normalisation."""
    advantages: Tensor | None = None
    """[T] float32, zero where `loss_mask` is false."""
    returns: Tensor | None = None
    """[T] float32, what a critic would be trained on."""

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def starts(self) -> Tensor:
        """[N] int64, index of each sample's first token."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def sample_ids(self) -> Tensor:
        """[T] int64, the sample that each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_samples), self.lengths)

    def with_(self, **changes: Any) -> "SampleBatch":
        """The same batch with some fields replaced."""
        return replace(self, **changes)

    def select(self, samples: Sequence[int] | Tensor) -> "SampleBatch":
        """Take some samples, in the order given; group ids are kept as they are."""
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        tokens = token_indices(self.starts[chosen], self.lengths[chosen])
        picked: dict[str, Any] = {"num_invalid_tokens": self.num_invalid_tokens, "task_ids": self.task_ids}
        for name, value in self.tensors():
            picked[name] = value[chosen if name in PER_SAMPLE else tokens]
        return SampleBatch(**picked)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The fields that are present, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> "SampleBatch":
        """Lay the samples of groups end to end.

        Raises:
            ValueError: There is no sample, or a sample's arrays differ in length or are empty.
        """
        samples = [sample for group in groups for sample in group.trajectories]
        if not samples:
            raise ValueError("a batch needs at least one sample")
        for sample in samples:
            _check_lengths(sample)
        lengths = torch.tensor([len(sample) for sample in samples])
        mask = _flat([sample.loss_mask for sample in samples], torch.bool)
        mask[lengths.cumsum(0) - lengths] = False
        batch = cls(
            lengths=lengths,
            input_ids=_flat([sample.input_ids for sample in samples], torch.int64),
            logprobs=_flat([sample.logprobs for sample in samples], torch.float32),
            loss_mask=mask,
            versions=_flat([sample.versions for sample in samples], torch.int32),
            rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
            group_ids=torch.tensor([i for i, group in enumerate(groups) for _ in group.trajectories]),
            task_ids=tuple(group.task_id for group in groups),
            no_eos=torch.tensor([sample.stop_reason is StopReason.LENGTH for sample in samples]),
        )
        return _without_invalid(batch)


PER_SAMPLE = frozenset({"lengths", "rewards", "group_ids", "no_eos", "final_rewards"})
"""Fields with one entry a sample; all other tensors have one a token."""


def token_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """[sum of lengths] int64: starts[0], starts[0] + 1, ... for each run in turn."""
    offsets = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return offsets + torch.arange(len(offsets))


def _check_lengths(sample: Trajectory) -> None:
    expected = len(sample.input_ids)
    for name in ("logprobs", "loss_mask", "versions"):
        if len(getattr(sample, name)) != expected or expected == 0:
            raise ValueError(f"a sample of {expected} tokens has {len(getattr(sample, name))} {name}")


def _flat(arrays: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(dtype, copy=True)


def _without_invalid(batch: SampleBatch) -> SampleBatch:
    """Take out of the loss what is not a finite number; the numbers themselves become 0."""
    bad_reward = ~batch.rewards.isfinite()
    bad_token = ~batch.logprobs.isfinite() | bad_reward[batch.sample_ids]
    return batch.with_(
        logprobs=batch.logprobs.masked_fill(bad_token, 0.0),
        rewards=batch.rewards.masked_fill(bad_reward, 0.0),
        loss_mask=batch.loss_mask & ~bad_token,
        num_invalid_tokens=int((bad_token & batch.loss_mask).sum()),
    )
