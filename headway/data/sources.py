"""Read raw rows from wherever `path` says they are.

    python:module.function     called with `split` and `seed` where it takes them, and `dataset_kwargs`
    reasoning_gym:NAME         procedural tasks with their own verifiers; `dataset_kwargs` are the task's settings
    a file                     .jsonl, .json or .parquet
    a folder                   files named after splits (train.jsonl, test.parquet, train-00000-of-00002.parquet),
                               also under data/ or below the folder of a configuration
    anything else              a dataset of the Hugging Face hub

A file that lies there always wins over a hub id of the same name.
"""

import importlib
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from headway.config.dataset import DatasetConfig
from headway.errors import InvalidInput

RawRow = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
DEFAULT_SPLIT_SEEDS = {"train": 0, "validation": 1_000_003, "valid": 1_000_003, "test": 2_000_003}
"""Added to the seed of procedural tasks, so that the splits do not repeat each other's rows."""


@dataclass(frozen=True)
class RawRows:
    """What a source gave."""

    rows: list[RawRow]
    source: str
    """Named in messages: the file, the hub id, the function."""


def read_source(config: DatasetConfig, seed: int) -> RawRows:
    """All raw rows of a source, at most `max_rows`.

    Raises:
        InvalidInput: It is not there or cannot be read; the message says what was looked for.
    """
    if not config.path:
        raise InvalidInput("the dataset has no path: give a folder, a file, a hub id, reasoning_gym:NAME or python:...")
    kind, _, name = config.path.partition(":")
    if kind == "python":
        return _limited(_call(name, config, seed), f"{config.path} ({config.split})", config)
    if kind == "reasoning_gym":
        return _limited(_reasoning_gym(name, config, seed), config.path, config)
    path = Path(config.path).expanduser()
    if path.is_file():
        return _limited(_read_file(path), str(path), config)
    if path.is_dir():
        return _folder(path, config)
    if path.is_absolute() or config.path.startswith((".", "~")) or path.suffix in SUFFIXES:
        raise InvalidInput(f"there is no file or folder {path}")
    return _limited(_hub(config), f"{config.path} ({config.split})", config)


def _limited(rows: Iterable[RawRow], source: str, config: DatasetConfig) -> RawRows:
    limited = list(islice(rows, config.max_rows))
    for number, row in enumerate(limited):
        if not isinstance(row, Mapping):
            raise InvalidInput(f"{source}: row {number} is a {type(row).__name__}, a mapping was meant")
    return RawRows(limited, source)


def _call(name: str, config: DatasetConfig, seed: int) -> Iterable[RawRow]:
    module_name, _, attribute = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"python:{name} cannot be imported: {error}") from error
    offered = {"split": config.split, "seed": seed} | config.dataset_kwargs
    try:
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        arguments = {k: v for k, v in offered.items() if takes_all or k in parameters or k in config.dataset_kwargs}
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InvalidInput(f"python:{name} cannot be called with {sorted(offered)}: {error}") from error
    rows: Iterable[RawRow] = function(**arguments)
    return rows


def _reasoning_gym(name: str, config: DatasetConfig, seed: int) -> Iterable[RawRow]:
    try:
        import reasoning_gym
    except ImportError:
        raise InvalidInput(f"{config.path} needs the package reasoning-gym: pip install reasoning-gym") from None
    settings = {"seed": seed + DEFAULT_SPLIT_SEEDS.get(config.split, 3_000_017)}
    if config.max_rows is not None:
        settings["size"] = config.max_rows
    try:
        dataset = reasoning_gym.create_dataset(name, **(settings | config.dataset_kwargs))
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise InvalidInput(f"{config.path} cannot be made: {error}") from error
    return (_reasoning_gym_row(entry) for entry in dataset)


def _reasoning_gym_row(entry: Mapping[str, Any]) -> RawRow:
    """The entry goes along, as JSON has it: the task's own verifier judges by it."""
    entry = orjson.loads(orjson.dumps(dict(entry), default=str, option=orjson.OPT_NON_STR_KEYS))
    messages = [{"role": "user", "content": entry["question"]}]
    return {**entry, "messages": messages, "source_dataset": entry["metadata"].get("source_dataset")}


def _read_file(path: Path) -> Iterable[RawRow]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".json":
        return _read_json(path)
    raise InvalidInput(f"{path}: files of rows end in {', '.join(SUFFIXES)}")


def _read_jsonl(path: Path) -> Iterable[RawRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InvalidInput(f"{path}:{number} is not JSON: {error}") from None


def _read_json(path: Path) -> Iterable[RawRow]:
    try:
        rows = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not JSON: {error}; one object a line is a .jsonl file") from None
    if not isinstance(rows, list):
        raise InvalidInput(f"{path}: a list of objects was meant, this is {type(rows).__name__}")
    return rows


def _read_parquet(path: Path) -> Iterable[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInput(f"{path} needs the package pyarrow: pip install pyarrow") from None
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise InvalidInput(f"{path} is not Parquet: {error}") from None


def _folder(path: Path, config: DatasetConfig) -> RawRows:
    roots = [path / config.name] if config.name and (path / config.name).is_dir() else [path]
    files = [file for root in [*roots, roots[0] / "data"] for file in _files_of_split(root, config.split)]
    if not files:
        found = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.suffix in SUFFIXES)
        raise InvalidInput(
            f"{path} has no file for the split {config.split!r} (like {config.split}.jsonl); "
            f"it has {', '.join(found) if found else 'no data files'}"
        )
    rows = (row for file in files for row in _read_file(file))
    return _limited(rows, f"{path} ({config.split})", config)


def _files_of_split(root: Path, split: str) -> list[Path]:
    """Files called like the split, whole or in numbered parts, of the first kind that there is."""
    if not root.is_dir():
        return []
    for suffix in SUFFIXES:
        parts = sorted(f for f in root.iterdir() if f.suffix == suffix and f.stem.split("-")[0] == split)
        if parts:
            return parts
    return []


def _hub(config: DatasetConfig) -> Iterable[RawRow]:
    try:
        import datasets
    except ImportError:
        raise InvalidInput(f"{config.path} is no file or folder here, and hub ids need: pip install datasets") from None
    name = config.name or ("main" if config.path == "openai/gsm8k" else None)
    datasets.disable_progress_bars()
    try:
        loaded: Iterable[RawRow] = datasets.load_dataset(config.path, name, split=config.split, **config.dataset_kwargs)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(
            f"{config.path} is no file or folder here, and the hub does not give it{offline}: {reason}. "
            f"Give a local folder instead, with {config.split}.jsonl or {config.split}.parquet"
        ) from error
    return loaded
