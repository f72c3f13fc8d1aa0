"""Row order is seeded: the same everywhere for one seed, another one in every epoch, every row once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.data.order import epoch_order

SEEDS = st.integers(-(2**63), 2**63)


@given(st.integers(0, 300), SEEDS, st.integers(0, 10_000))
def test_every_row_comes_exactly_once(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, seed, epoch, shuffle=True)
    assert sorted(order.tolist()) == list(range(num_rows))


@given(st.integers(0, 300), SEEDS, st.integers(0, 10_000))
def test_the_order_depends_on_seed_and_epoch_alone(num_rows: int, seed: int, epoch: int) -> None:
    first, again = (epoch_order(num_rows, seed, epoch, shuffle=True) for _ in range(2))
    assert np.array_equal(first, again)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(epoch_order(50, seed, epoch, shuffle=True).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_the_one_that_earlier_releases_gave() -> None:
    assert epoch_order(8, seed=1, epoch=0, shuffle=True).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    assert epoch_order(4, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3]
