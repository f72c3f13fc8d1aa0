"""Every whole line of the dumps is in the index once, whenever and however often it is caught up with."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_dumps import append, encoded, group, trained_line

from headway.view import index as index_module
from headway.view.index import Index
from headway.view.lines import head_of, line_at


def make(root: Path) -> Index:
    return Index(root / "rollout" / "index.sqlite", {"train": root / "rollout", "evaluation": root / "eval-rollout"})


def rows(index: Index, query: str) -> list[tuple[Any, ...]]:
    with index.open() as connection:
        return [tuple(row) for row in connection.execute(query)]


def test_a_group_is_summed_up_and_its_lines_are_found_again(tmp_path: Path) -> None:
    path = append(tmp_path / "rollout", 4, [*group("0/7", [0.0, 1.0]), *group("0/8", [1.0], num_loss_tokens=9)])
    index = make(tmp_path)
    index.catch_up()
    columns = "task_id, kind, step, num_samples, reward, reward_min, reward_max, length, version_min, version_max"
    assert rows(index, f"SELECT {columns} FROM groups") == [
        ("0/7", "train", 4, 2, 0.5, 0.0, 1.0, 2.0, 3, 4),
        ("0/8", "train", 4, 1, 1.0, 1.0, 1.0, 9.0, 3, 4),
    ]
    places = rows(index, "SELECT offset, size FROM samples ORDER BY group_id, sample")
    found = [line_at(path, *place) for place in places]
    assert [(line["task_id"], line["sample"]) for line in found] == [("0/7", 0), ("0/7", 1), ("0/8", 0)]


@given(cuts=st.lists(st.integers(0, 2000), max_size=8), lines_at_once=st.integers(1, 5))
def test_a_file_that_grows_by_any_pieces_is_indexed_like_one_that_was_whole(
    cuts: list[int], lines_at_once: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = encoded([*group("0/1", [0.0, 1.0, 1.0]), *group("0/2", [1.0]), *group("0/1", [0.5, 0.5], attempt=2)])
    whole, grown = (tmp_path_factory.mktemp(name) for name in ("whole", "grown"))
    append(whole / "rollout", 0, [])
    (whole / "rollout/0/samples.jsonl").write_bytes(content)
    expected = make(whole)
    expected.catch_up()
    index = make(grown)
    path = append(grown / "rollout", 0, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "LINES_IN_TRANSACTION", lines_at_once)
        for end in [*sorted(cuts), len(content)]:
            path.write_bytes(content[:end])
            index.catch_up()
    for query in ("SELECT * FROM groups", "SELECT * FROM samples", "SELECT name, known_bytes FROM files"):
        assert rows(index, query) == rows(expected, query)


def test_what_the_trainer_consumed_is_marked_in_whichever_order_the_files_come(tmp_path: Path) -> None:
    for name, order in (("a", ("samples", "trained")), ("b", ("trained", "samples"))):
        root = tmp_path / name / "rollout"
        index = make(tmp_path / name)
        for kind in order:
            if kind == "samples":
                append(root, 4, [*group("0/1", [1.0, 1.0]), *group("0/2", [1.0])])
            else:
                lines = [trained_line("0/1", number, 6) for number in range(2)]
                append(root, 6, lines, "trained.jsonl")
            index.catch_up()
        columns = "SELECT task_id, consumed_step, staleness FROM groups"
        assert rows(index, columns) == [("0/1", 6, 3), ("0/2", None, None)]


def test_the_accepted_attempt_is_the_one_that_was_consumed(tmp_path: Path) -> None:
    root = tmp_path / "rollout"
    append(root, 4, group("0/1", [1.0], attempt=1))
    append(root, 5, group("0/1", [1.0], attempt=2))
    append(root, 6, group("0/1", [1.0], attempt=3, outcome="rejected"))
    append(tmp_path / "eval-rollout", 6, group("0/1", [1.0]))
    append(root, 7, [trained_line("0/1", 0, 7)], "trained.jsonl")
    index = make(tmp_path)
    index.catch_up()
    assert rows(index, "SELECT attempt, kind, consumed_step FROM groups ORDER BY step, kind DESC") == [
        (1, "train", None),
        (2, "train", 7),
        (3, "train", None),
        (1, "evaluation", None),
    ]


def test_a_step_that_was_trained_again_is_the_new_one(tmp_path: Path) -> None:
    root = tmp_path / "rollout"
    append(root, 4, [*group("0/1", [1.0]), *group("0/2", [1.0])])
    path = append(root, 6, [trained_line("0/1", 0, 6)], "trained.jsonl")
    index = make(tmp_path)
    index.catch_up()
    path.unlink()
    append(root, 6, [trained_line("0/2", 0, 6)], "trained.jsonl")
    index.catch_up()
    size = len(encoded([trained_line("0/2", 0, 6)]))
    assert rows(index, "SELECT task_id, offset, size FROM trained") == [("0/2", 0, size)]
    assert rows(index, "SELECT task_id, staleness FROM groups") == [("0/1", None), ("0/2", 3)]


def test_the_writer_of_a_live_run_indexes_what_the_trainer_wrote_since(tmp_path: Path) -> None:
    root, index = tmp_path / "rollout", make(tmp_path)
    for step in range(4):
        path = append(root, step, group(f"0/{step}", [1.0]))
        if step:
            append(root, step - 1, [trained_line(f"0/{step - 1}", 0, step - 1)], "trained.jsonl")
        index.catch_up_with([path])
    assert rows(index, "SELECT consumed_step FROM groups ORDER BY id") == [(0,), (1,), (2,), (None,)]
    assert index.unread_bytes() == 0


def test_a_folder_that_was_moved_is_not_read_again(tmp_path: Path) -> None:
    append(tmp_path / "old/rollout", 4, group("0/1", [1.0]))
    make(tmp_path / "old").catch_up()
    (tmp_path / "old").rename(tmp_path / "new")
    index = make(tmp_path / "new")
    index.catch_up()
    assert rows(index, "SELECT count(*) FROM groups") == [(1,)]


def test_two_that_catch_up_at_once_take_each_line_once(tmp_path: Path) -> None:
    for step in range(20):
        append(tmp_path / "rollout", step, [*group(f"0/{step}", [1.0, 0.0]), *group(f"1/{step}", [1.0])])
    threads = [threading.Thread(target=make(tmp_path).catch_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(make(tmp_path), "SELECT count(*), sum(num_samples) FROM groups") == [(40, 60)]


def test_texts_that_look_like_the_end_of_a_head_do_not_end_it() -> None:
    line = encoded(group('0/1","token_ids":[', [1.0], prompt=',"token_ids":[1', completion=',"loss_mask":[')).strip()
    head = head_of(line)
    assert head["prompt"] == ',"token_ids":[1'
    assert head["completion"] == ',"loss_mask":['
    assert "token_ids" not in head
