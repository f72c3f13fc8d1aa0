"""Pages of groups yield every group that passes the filters once, in order, also while others come."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_dumps import append, group, trained_line

from headway.errors import InvalidInput
from headway.view.groups import Filters, Order, count, find
from headway.view.index import Index

REWARDS, LENGTHS, STEPS = (None, 0.0, 0.5, 1.0), (1, 2, 3), range(4)
made_groups = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.sampled_from(STEPS),
            "reward": st.sampled_from(REWARDS),
            "num_loss_tokens": st.sampled_from(LENGTHS),
            "outcome": st.sampled_from(("accepted", "rejected")),
            "consumed": st.sampled_from((None, 4, 5)),
        }
    ),
    max_size=12,
)
bounds = {
    f"{side}_{name}": st.none() | st.sampled_from(values)
    for name, values in {"reward": (0.0, 0.5, 1.0), "length": LENGTHS, "staleness": (0, 1, 2), "step": STEPS}.items()
    for side in ("min", "max")
}
made_filters = st.builds(
    Filters,
    kind=st.sampled_from((None, "train", "evaluation")),
    outcome=st.sampled_from((None, "accepted")),
    search=st.sampled_from((None, "0/1", "PROMPT", "of 0/2")),
    **bounds,
)
made_orders = st.builds(Order, st.sampled_from(("step", "reward", "length", "staleness")), st.booleans())


def index_of(root: Path, groups: list[dict[str, Any]], first: int = 0) -> Index:
    for number, values in enumerate(groups, first):
        changes = {name: values[name] for name in ("num_loss_tokens", "outcome")}
        append(root, values["step"], group(f"0/{number}", [values["reward"]], **changes))  # type: ignore[list-item]
        if values["consumed"] is not None:
            append(root, values["consumed"], [trained_line(f"0/{number}", 0, values["consumed"])], "trained.jsonl")
    index = Index(root / "index.sqlite", {"train": root})
    index.catch_up()
    return index


def pages(index: Index, filters: Filters, order: Order, limit: int) -> list[Any]:
    found, cursor = [], None
    with index.open() as connection:
        while True:
            page, cursor = find(connection, filters, order, limit, cursor)
            found += page
            assert len(page) == limit or cursor is None
            if cursor is None:
                return found


def passes(one: Any, filters: Filters) -> bool:
    def is_between(value: float | None, low: float | None, high: float | None) -> bool:
        if low is None and high is None:
            return True
        return value is not None and (low is None or value >= low) and (high is None or value <= high)

    search = filters.search
    return (
        filters.kind in (None, one.kind)
        and filters.outcome in (None, one.outcome)
        and (search is None or search.lower() in one.prompt.lower() or one.task_id.startswith(search))
        and is_between(one.reward, filters.min_reward, filters.max_reward)
        and is_between(one.length, filters.min_length, filters.max_length)
        and is_between(one.staleness, filters.min_staleness, filters.max_staleness)
        and is_between(one.step, filters.min_step, filters.max_step)
    )


@settings(max_examples=60)
@given(groups=made_groups, filters=made_filters, order=made_orders, limit=st.integers(1, 5))
def test_paging_yields_each_group_that_passes_once_in_order(
    groups: list[dict[str, Any]],
    filters: Filters,
    order: Order,
    limit: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    index = index_of(tmp_path_factory.mktemp("run"), groups)
    everything = pages(index, Filters(), Order(), 100)
    assert len(everything) == len(groups)
    found = pages(index, filters, order, limit)
    assert sorted(one.task_id for one in found) == sorted(one.task_id for one in everything if passes(one, filters))
    values = [getattr(one, order.sort) for one in found]
    known = [-1e308 if value is None else value for value in values]
    assert known == sorted(known, reverse=not order.is_ascending)
    with index.open() as connection:
        assert count(connection, filters) == len(found)


def test_groups_that_come_between_two_pages_repeat_and_hide_none(tmp_path: Path) -> None:
    values = {"step": 1, "reward": 0.5, "num_loss_tokens": 2, "outcome": "accepted", "consumed": None}
    index, order = index_of(tmp_path, [values] * 6), Order("reward")
    with index.open() as connection:
        first, cursor = find(connection, Filters(), order, 3)
    index = index_of(tmp_path, [values | {"reward": 1.0}, values], first=6)
    with index.open() as connection:
        second, cursor = find(connection, Filters(), order, 3, cursor)
    assert [one.task_id for one in first + second] == ["0/5", "0/4", "0/3", "0/2", "0/1", "0/0"]
    assert cursor is None


@pytest.mark.parametrize(
    "cursor", ["x", "bm90IGpzb24=", "WzEsMl0=", "WyJyZXdhcmQiLCJhIiwxXQ==", "WyJzdGVwIiwxLDFd", "MQ==", "é"]
)
def test_a_cursor_that_no_page_gave_is_refused(tmp_path: Path, cursor: str) -> None:
    index = index_of(tmp_path, [])
    with index.open() as connection, pytest.raises(InvalidInput, match="cursor"):
        find(connection, Filters(), Order("reward"), 3, cursor)


def test_every_order_reads_an_index_and_sorts_nothing(tmp_path: Path) -> None:
    index = index_of(tmp_path, [])
    with index.open() as connection:
        for sort in ("step", "reward", "length", "staleness"):
            for is_ascending in (True, False):
                clause = Order(sort, is_ascending).clause()
                plan = connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM groups {clause} LIMIT 50").fetchall()
                assert [row["detail"] for row in plan] == [f"SCAN groups USING INDEX groups_by_{sort}"]
