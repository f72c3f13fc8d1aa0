"""Normalisation is y = (x - mean) / (std + eps) over the batch or each group, by group id, with float64 inside."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithm.normalization import normalize
from headway.config.actor import NormConfig

LEVELS = ["batch", "group", None]


def reference(x: list[float], mask: list[bool], groups: list[int], config: NormConfig) -> list[float]:
    """One number after the other, with the statistics module."""
    out = []
    for i, value in enumerate(x):
        peers = {
            level: [j for j in range(len(x)) if mask[j] and (level == "batch" or groups[j] == groups[i])]
            for level in ("batch", "group")
        }

        def mean_for(j: int) -> float:
            if config.mean_level is None:
                return 0.0
            members = [k for k in range(len(x)) if mask[k] and (config.mean_level == "batch" or groups[k] == groups[j])]
            others = [x[k] for k in members if k != j] if config.mean_leave1out else [x[k] for k in members]
            return statistics.fmean(others) if others else 0.0

        if not mask[i]:
            out.append(0.0)
            continue
        centred = value - mean_for(i)
        if config.std_level is not None:
            members = peers[config.std_level]
            squares = sum((x[j] - mean_for(j)) ** 2 for j in members)
            degrees = len(members) - 1 if config.std_unbiased else len(members)
            std = math.sqrt(squares / degrees) if degrees > 0 else 1.0
            centred /= std + config.eps
        out.append(centred)
    return out


@given(
    rows=st.lists(st.tuples(st.floats(-5, 5), st.booleans(), st.integers(0, 3)), min_size=1, max_size=14),
    mean_level=st.sampled_from(LEVELS),
    std_level=st.sampled_from(LEVELS),
    leave_one_out=st.booleans(),
    unbiased=st.booleans(),
)
def test_equals_the_reference_on_ragged_groups(
    rows: list[Any], mean_level: Any, std_level: Any, leave_one_out: bool, unbiased: bool
) -> None:
    x, mask, groups = ([row[i] for row in rows] for i in range(3))
    config = NormConfig(
        mean_level=mean_level, std_level=std_level, mean_leave1out=leave_one_out, std_unbiased=unbiased, eps=1e-3
    )
    single = torch.tensor(x, dtype=torch.float32)
    found = normalize(single, torch.tensor(mask), torch.tensor(groups), config)
    assert found.tolist() == pytest.approx(reference(single.tolist(), mask, groups, config), rel=1e-4, abs=1e-5)


def test_a_group_of_equal_rewards_gives_zeros() -> None:
    x, everyone = torch.tensor([0.1] * 4 + [0.0, 1.0]), torch.ones(6, dtype=torch.bool)
    config = NormConfig(mean_level="group", std_level="group")
    found = normalize(x, everyone, torch.tensor([0, 0, 0, 0, 1, 1]), config)
    assert found[:4].tolist() == [0.0] * 4
    assert found[4:].tolist() == pytest.approx([-0.70710, 0.70710], abs=1e-4)


def test_an_incomplete_group_is_normalised_by_its_own_size() -> None:
    x, everyone = torch.tensor([0.0, 2.0, 1.0, 3.0, 5.0]), torch.ones(5, dtype=torch.bool)
    config = NormConfig(mean_level="group", std_level="group", group_size=2)
    found = normalize(x, everyone, torch.tensor([0, 0, 1, 1, 1]), config)
    assert found[2:].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-4)


def test_groups_need_not_lie_next_to_each_other() -> None:
    x, everyone = torch.tensor([1.0, 10.0, 3.0, 30.0]), torch.ones(4, dtype=torch.bool)
    config = NormConfig(mean_level="group", std_level=None)
    assert normalize(x, everyone, torch.tensor([7, 2, 7, 2]), config).tolist() == [-1.0, -10.0, 1.0, 10.0]


def test_a_single_sample_has_spread_one_and_leave_one_out_mean_zero() -> None:
    one, everyone = torch.tensor([2.0]), torch.tensor([True])
    plain = normalize(one, everyone, torch.tensor([0]), NormConfig(mean_level=None, std_level="group"))
    assert plain.tolist() == pytest.approx([2.0], rel=1e-4)
    config = NormConfig(mean_level="group", std_level=None, mean_leave1out=True)
    assert normalize(one, everyone, torch.tensor([0]), config).tolist() == [2.0]


def test_nothing_in_the_mask_gives_zeros() -> None:
    found = normalize(torch.tensor([1.0, 2.0]), torch.tensor([False, False]), torch.tensor([0, 0]), NormConfig())
    assert found.tolist() == [0.0, 0.0]
