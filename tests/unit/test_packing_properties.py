"""Packing meets the budget with a near-minimal number of bins; balance comes within 2 % of even at 8 ranks."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.packing import balance, pack

SIZES = st.lists(st.integers(0, 60), max_size=40)


def sums(sizes: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(sizes[i] for i in part) for part in parts]


def first_fit_decreasing(sizes: list[int], capacity: int) -> int:
    """Number of bins."""
    loads: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = next((i for i, load in enumerate(loads) if load + size <= capacity), len(loads))
        loads[place : place + 1] = [(loads[place] if place < len(loads) else 0) + size]
    return len(loads)


def lengths(seed: int, num: int, longest: int = 8192) -> list[int]:
    """Log-normal, as completions are."""
    rng = random.Random(seed)
    return [min(longest, max(16, int(rng.lognormvariate(6, 1)))) for _ in range(num)]


@given(SIZES, st.integers(1, 9))
def test_balance_gives_every_item_to_one_part(sizes: list[int], num_parts: int) -> None:
    parts = balance(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))


@given(SIZES, st.integers(1, 9))
def test_balance_is_never_worse_than_dealing_the_largest_first(sizes: list[int], num_parts: int) -> None:
    loads = [0] * num_parts
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    assert max(sums(sizes, balance(sizes, num_parts))) <= max(loads)


@given(SIZES, st.integers(60, 200), st.integers(1, 12))
def test_pack_meets_budget_and_count(sizes: list[int], capacity: int, min_bins: int) -> None:
    bins = pack(sizes, capacity, min_bins=min_bins)
    assert sorted(i for part in bins for i in part) == list(range(len(sizes)))
    assert all(bins)
    assert all(total <= capacity for total in sums(sizes, bins))
    assert len(bins) >= min(min_bins, len(sizes))
    # best-fit decreasing never needs more than 11/9 of the optimum and 1, which first-fit decreasing is not below
    assert len(bins) <= max(11 / 9 * first_fit_decreasing(sizes, capacity) + 1, min_bins)


@pytest.mark.parametrize("num", [128, 512, 2048])
@pytest.mark.parametrize("seed", range(3))
def test_balance_over_eight_ranks_is_within_two_percent(num: int, seed: int) -> None:
    sizes = lengths(seed, num)
    loads = sums(sizes, balance(sizes, 8))
    assert max(loads) <= max(1.02 * sum(sizes) / 8, max(sizes))


@pytest.mark.parametrize("num", [128, 512, 2048])
@pytest.mark.parametrize("seed", range(3))
def test_pack_needs_no_more_bins_than_the_lower_bound_on_real_lengths(num: int, seed: int) -> None:
    sizes = lengths(seed, num)
    assert len(pack(sizes, 10240)) == math.ceil(sum(sizes) / 10240)


def test_equal_sizes_are_dealt_out_equally() -> None:
    assert sorted(len(part) for part in balance([7] * 16, 8)) == [2] * 8


def test_the_same_sizes_give_the_same_answer() -> None:
    sizes = lengths(1, 300)
    assert balance(sizes, 8) == balance(list(sizes), 8)
    assert pack(sizes, 9000) == pack(list(sizes), 9000)


def test_an_item_above_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="item 1 of size 9"):
        pack([3, 9], 8)


def test_nothing_needs_no_bin() -> None:
    assert pack([], 5) == []
    assert balance([], 2) == [[], []]
