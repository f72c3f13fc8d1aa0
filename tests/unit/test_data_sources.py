"""Rows come from files, folders, functions and procedural tasks; what cannot be read is told with what was sought."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from headway.config import DatasetConfig, ValidDatasetConfig
from headway.data.sources import read_source
from headway.errors import InvalidInput

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def read(path: object, **settings: Any) -> list[Any]:
    return read_source(DatasetConfig(path=str(path), **settings), seed=1).rows


def error_of(path: object, **settings: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read(path, **settings)
    return str(caught.value)


def test_files_of_each_kind_give_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS), "utf-8")
    for name in ("a.jsonl", "a.parquet", "a.json"):
        assert read(tmp_path / name) == ROWS


def test_a_folder_gives_the_file_of_the_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    assert read(tmp_path) == ROWS
    assert read(tmp_path, split="test") == ROWS[:1]
    assert read_source(ValidDatasetConfig(path=str(tmp_path)), seed=1).rows == ROWS[:1]


def test_a_folder_in_the_hubs_layout_is_read_in_the_order_of_its_parts(tmp_path: Path) -> None:
    write_parquet(tmp_path / "main" / "train-00000-of-00002.parquet", ROWS[:1])
    write_parquet(tmp_path / "main" / "train-00001-of-00002.parquet", ROWS[1:])
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", ROWS[1:])
    assert read(tmp_path, name="main") == ROWS
    assert read(tmp_path) == ROWS[1:]


def test_a_split_that_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert "no file for the split 'test' (like test.jsonl); it has train.jsonl" in error_of(tmp_path, split="test")
    (tmp_path / "train.jsonl").unlink()
    assert "it has no data files" in error_of(tmp_path)


def test_the_first_rows_alone_can_be_asked_for(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert read(tmp_path / "a.jsonl", max_rows=1) == ROWS[:1]


def test_a_broken_line_is_told_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": \n', "utf-8")
    assert f"{tmp_path / 'a.jsonl'}:3 is not JSON" in error_of(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("[1]\n", "utf-8")
    assert "row 0 is a list, a mapping was meant" in error_of(tmp_path / "b.jsonl")
    (tmp_path / "c.json").write_text('{"a": 1}', "utf-8")
    assert "a list of objects was meant" in error_of(tmp_path / "c.json")
    (tmp_path / "d.parquet").write_text("no", "utf-8")
    assert "is not Parquet" in error_of(tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text("a,b", "utf-8")
    assert "files of rows end in .jsonl, .json, .parquet" in error_of(tmp_path / "e.csv")


def test_a_path_that_is_not_there_is_no_hub_id(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", "./absent", "absent.jsonl"):
        assert "there is no file or folder" in error_of(path)
    assert "the dataset has no path" in error_of("")


def test_a_hub_id_that_cannot_be_had_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    told = error_of("openai/gsm8k")
    assert "Couldn't reach 'openai/gsm8k' on the Hub. Give a local folder instead, with train.jsonl" in told


def test_a_hub_id_is_asked_for_its_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load(*arguments: object, **settings: object) -> list[dict[str, str]]:
        asked.append((arguments, settings))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("openai/gsm8k", split="test", dataset_kwargs={"revision": "main"}) == ROWS
    assert read("some/other", name="easy") == ROWS
    assert asked == [
        (("openai/gsm8k", "main"), {"split": "test", "revision": "main"}),
        (("some/other", "easy"), {"split": "train"}),
    ]


def made(split: str, seed: int, size: int = 2) -> list[dict[str, object]]:
    return [{"prompt": f"{split} {seed} {number}"} for number in range(size)]


def plain() -> list[dict[str, object]]:
    return [{"prompt": "always"}]


def test_a_function_is_called_with_what_it_takes() -> None:
    assert read(f"python:{__name__}.made", split="test") == made("test", 1)
    assert read(f"python:{__name__}.made", dataset_kwargs={"size": 3, "seed": 5}) == made("train", 5, 3)
    assert read(f"python:{__name__}.plain") == plain()


def test_a_function_that_is_not_there_or_takes_other_arguments_is_told() -> None:
    assert "cannot be imported" in error_of("python:no.such.module")
    assert "cannot be imported" in error_of(f"python:{__name__}.absent")
    assert "cannot be called with" in error_of(f"python:{__name__}.made", dataset_kwargs={"colour": 1})


def test_procedural_tasks_are_seeded_and_their_splits_differ() -> None:
    settings: dict[str, Any] = {"max_rows": 5, "dataset_kwargs": {"max_terms": 3}}
    rows = read("reasoning_gym:chain_sum", **settings)
    assert rows == read("reasoning_gym:chain_sum", **settings)
    assert rows != read("reasoning_gym:chain_sum", split="test", **settings)
    assert rows[0].keys() >= {"messages", "answer", "metadata", "source_dataset"}
    assert rows[0]["source_dataset"] == "chain_sum"
    assert "cannot be made" in error_of("reasoning_gym:no_such_task")
