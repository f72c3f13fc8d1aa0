"""Stand-ins for the proximal policy follow the versions of the tokens; M2PO drops as few tokens as it must."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithm.proximal import approximations, interpolation, second_moment_mask


def test_interpolation_goes_from_the_behaviour_to_the_current_version() -> None:
    """a = clip((v_prox - v_beh) / (v_theta - v_beh), 0, 1), v_theta the current version, v_prox the one before."""
    versions = torch.tensor([10, 9, 8, 7, 0, -1])
    assert interpolation(versions, 10).tolist() == pytest.approx([0, 0, 1 / 2, 2 / 3, 9 / 10, 0])


def test_approximations_mix_in_log_space_in_probability_space_or_not_at_all() -> None:
    now, before = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -0.5])
    found = approximations(now, before, torch.tensor([8, 9]), 10)
    assert found["loglinear"].tolist() == pytest.approx([-2.0, -0.5])
    assert found["linear"].tolist() == pytest.approx([math.log((math.exp(-3) + math.exp(-1)) / 2), -0.5], rel=1e-5)
    assert found["rollout"].tolist() == [-3.0, -0.5]


def test_approximations_carry_no_gradient() -> None:
    now = torch.tensor([-1.0], requires_grad=True)
    found = approximations(now, torch.tensor([-3.0]), torch.tensor([8]), 10)
    assert not any(value.requires_grad for value in found.values())


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0.01, 4))
def test_m2po_keeps_the_largest_set_of_small_moments_below_the_threshold(
    distances: list[float], threshold: float
) -> None:
    behaviour = torch.tensor(distances, dtype=torch.float64)
    kept = second_moment_mask(behaviour, torch.zeros_like(behaviour), threshold)
    moments = sorted(d * d for d in behaviour.tolist())
    sizes = [n for n in range(1, len(moments) + 1) if sum(moments[:n]) / n < threshold]
    assert int(kept.sum()) == max(sizes, default=1)
    inside, outside = behaviour[kept].square(), behaviour[~kept].square()
    assert len(outside) == 0 or inside.max() <= outside.min()


def test_m2po_of_nothing_is_nothing() -> None:
    assert second_moment_mask(torch.empty(0), torch.empty(0), 0.1).tolist() == []
