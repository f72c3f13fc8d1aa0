"""Normalisation of rewards and advantages over the batch or over each group: y = (x - mean) / (std + eps).

Groups are told apart by their ids, never by position, so an incomplete group is normalised by its own size (AReaL
slices by a fixed size, and divides an incomplete last group by eps). As in AReaL, the standard deviation is about the
mean that was subtracted: with `mean_level: group`, `std_level: batch` it is the spread around the groups' means.
Sums are float64; the result is float32 and zero outside the mask.
"""

import torch
from torch import Tensor

from headway.config.actor import NormConfig


def normalize(x: Tensor, mask: Tensor, group_ids: Tensor, config: NormConfig) -> Tensor:
    """Normalise the entries of `x` [n] where `mask` [n] holds; `group_ids` [n] are not negative.

    A group with one entry has a standard deviation of 1 (unbiased), and a leave-one-out mean of 0.
    """
    values = x.double()[mask]
    levels = {"batch": torch.zeros_like(group_ids[mask]), "group": group_ids[mask]}
    if config.mean_level is not None:
        values = values - _mean(values, levels[config.mean_level], config.mean_leave1out)
    if config.std_level is not None:
        std = _root_mean_square(values, levels[config.std_level], config.std_unbiased)
        values = values / (std + config.eps)
    return torch.zeros_like(x, dtype=torch.float32).masked_scatter(mask, values.float())


def _mean(values: Tensor, ids: Tensor, leave_one_out: bool) -> Tensor:
    """[m] the mean of each entry's group, without the entry itself if asked."""
    count, total = _per_group(torch.ones_like(values), ids), _per_group(values, ids)
    if leave_one_out:
        return (total - values) / (count - 1).clamp(min=1) * (count > 1)
    return total / count


def _root_mean_square(centred: Tensor, ids: Tensor, unbiased: bool) -> Tensor:
    """[m] the spread of each entry's group."""
    count, total = _per_group(torch.ones_like(centred), ids), _per_group(centred.square(), ids)
    if not unbiased:
        return (total / count).sqrt()
    return torch.where(count > 1, total / (count - 1).clamp(min=1), 1.0).sqrt()


def _per_group(values: Tensor, ids: Tensor) -> Tensor:
    """[m] the sum over each entry's group."""
    sums = values.new_zeros(int(ids.max()) + 1 if len(ids) else 0)
    return sums.index_add_(0, ids, values)[ids]
