"""Datasets: which rows there are, which were left out and why, and in which order they become tasks.

    source -> raw rows -> [adapter] -> rows -> [length filter] -> Dataset -> [seeded order] -> tasks, from a cursor

Guarantees: a task id is `epoch/row`, with the row's number in the source, so it means the same row whatever filter or
order is set. The same file, seed and cursor give the same tasks on every machine. Every row is either in the dataset or
counted in `left_out`. A dataset is never empty.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from headway.config.dataset import DatasetConfig
from headway.data.order import epoch_order
from headway.data.rows import Row, adapter_of
from headway.data.sources import RawRows, read_source
from headway.errors import InvalidInput
from headway.workflow.api import Tokenizer
from headway.workflow.prompts import template_ids

CHUNK = 256


class Cursor(NamedTuple):
    """How far the dataset has been taken: `position` tasks of `epoch`. JSON-able as `[epoch, position]`."""

    epoch: int = 0
    position: int = 0


START = Cursor()


@dataclass(frozen=True, slots=True)
class Task:
    """One row to be rolled out."""

    task_id: str
    """`epoch/row`, with the row's number in the source."""
    data: Row
    after: Cursor
    """Where to go on behind this task."""

    @property
    def data_json(self) -> bytes:
        """The row as it travels."""
        return orjson.dumps(self.data, option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(frozen=True)
class LeftOut:
    """Rows of the source that are not used."""

    too_long: int = 0
    """Prompts longer than `max_length` tokens."""
    no_prompt: int = 0
    """Rows whose prompt is empty."""
    longest: int = 0
    """Tokens of the longest prompt among the too long ones."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.too_long + self.no_prompt


class Dataset:
    """Rows in memory, with their numbers in the source."""

    def __init__(
        self,
        config: DatasetConfig,
        seed: int,
        source: str,
        rows: Sequence[Row],
        row_ids: Sequence[int],
        prompt_lengths: Sequence[int],
        left_out: LeftOut,
    ) -> None:
        self.source = source
        """Where the rows come from, for messages."""
        self.rows = rows
        self.prompt_lengths = np.asarray(prompt_lengths, dtype=np.int64)
        """[len] tokens of each prompt, chat template included; 0 where no tokenizer was given."""
        self.left_out = left_out
        self._config = config
        self._seed = seed
        self._row_ids = np.asarray(row_ids, dtype=np.int64)
        self._position_of_id = {int(row_id): position for position, row_id in enumerate(row_ids)}
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tasks_per_epoch(self) -> int:
        """Tasks of one epoch: with `drop_last`, those that fill whole batches."""
        size = self._config.batch_size
        return len(self) // size * size if self._config.drop_last else len(self)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that one epoch fills; a rest without `drop_last` counts as one."""
        return -(-self.tasks_per_epoch // self._config.batch_size)

    def tasks(self, cursor: Cursor = START) -> Iterator[Task]:
        """All tasks from the cursor on, without end: epoch after epoch."""
        epoch, position = cursor
        while True:
            order = self._order_of(epoch)
            for place in range(position, self.tasks_per_epoch):
                row = int(order[place])
                yield Task(f"{epoch}/{self._row_ids[row]}", self.rows[row], Cursor(epoch, place + 1))
            epoch, position = epoch + 1, 0

    def data_of(self, task_id: str) -> Row:
        """The row of a task, for submitting it again.

        Raises:
            InvalidInput: It is no task id, or its row is not in this dataset.
        """
        epoch, slash, row = task_id.partition("/")
        if not (slash and epoch.isdigit() and row.isdigit()) or int(row) not in self._position_of_id:
            raise InvalidInput(f"{self.source} has no task {task_id!r}; a task id is `epoch/row`")
        return self.rows[self._position_of_id[int(row)]]

    def longest_prompt(self) -> tuple[str, int]:
        """(task id in epoch 0, tokens) of the longest prompt."""
        place = int(self.prompt_lengths.argmax())
        return f"0/{self._row_ids[place]}", int(self.prompt_lengths[place])

    def report(self) -> str:
        """One line: how many rows, how many left out and why."""
        text = f"{self.source}: {len(self)} rows"
        if self.prompt_lengths.any():
            text += f", prompts of {self.prompt_lengths.min()} to {self.prompt_lengths.max()} tokens"
        if self.left_out.too_long:
            text += (
                f"; {self.left_out.too_long} left out with prompts longer than max_length {self._config.max_length} "
                f"(up to {self.left_out.longest})"
            )
        return text + (f"; {self.left_out.no_prompt} left out without a prompt" if self.left_out.no_prompt else "")

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self), self._seed, epoch, shuffle=self._config.shuffle)
        return self._order[1]


def open_dataset(config: DatasetConfig, tokenizer: Tokenizer | None, seed: int) -> Dataset:
    """Read a source, adapt its rows, leave out what is too long, and count it.

    Args:
        config: `train_dataset` or `valid_dataset`.
        tokenizer: Counts the tokens of prompts; may be None where nothing is filtered by length.
        seed: The experiment's.

    Raises:
        InvalidInput: The source cannot be read, or no row (or no whole batch) is left; the message has the counts.
    """
    if config.max_length is not None and tokenizer is None:
        raise InvalidInput(f"{config.path}: max_length {config.max_length} needs a tokenizer to count tokens")
    raw = read_source(config, seed)
    numbered = _adapted(raw)
    with_prompt = [(number, row) for number, row in numbered if row.get("messages") or row.get("prompt")]
    lengths = prompt_lengths([row for _, row in with_prompt], tokenizer, config.num_workers)
    limit = config.max_length or np.iinfo(np.int64).max
    kept = [(n, row, length) for (n, row), length in zip(with_prompt, lengths, strict=True) if length <= limit]
    too_long = [length for length in lengths if length > limit]
    left_out = LeftOut(len(too_long), len(numbered) - len(with_prompt), max(too_long, default=0))
    if not kept:
        raise InvalidInput(_nothing_left(config, raw.source, len(numbered), left_out))
    row_ids, rows, kept_lengths = zip(*kept, strict=True)
    dataset = Dataset(config, seed, raw.source, rows, row_ids, kept_lengths, left_out)
    if dataset.tasks_per_epoch == 0:
        raise InvalidInput(
            f"{raw.source}: {len(dataset)} rows do not fill one batch of {config.batch_size}, and drop_last leaves out "
            f"what does not: lower batch_size, or set drop_last: false"
        )
    return dataset


def _adapted(raw: RawRows) -> list[tuple[int, Row]]:
    """(number in the source, row) of every raw row."""
    if not raw.rows:
        raise InvalidInput(f"{raw.source} has no rows")
    adapter = adapter_of(raw.rows, raw.source)
    numbered = [(number, adapter.adapt(row)) for number, row in enumerate(raw.rows)]
    for number, row in numbered:
        try:
            orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise InvalidInput(f"{raw.source}: row {number} cannot be sent as JSON: {error}") from None
    return numbered


def _nothing_left(config: DatasetConfig, source: str, total: int, left_out: LeftOut) -> str:
    text = f"{source}: none of {total} rows is left: {left_out.too_long} prompts are longer than max_length "
    text += f"{config.max_length} tokens"
    if left_out.no_prompt:
        text += f", {left_out.no_prompt} rows have no prompt"
    return text + (f"; the longest has {left_out.longest}" if left_out.longest else "")


def prompt_lengths(rows: Sequence[Row], tokenizer: Tokenizer | None, num_threads: int = 0) -> list[int]:
    """Tokens of each row's prompt as workflows encode it; 0 for all without a tokenizer."""
    if tokenizer is None:
        return [0] * len(rows)
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]

    def count(chunk: Sequence[Row]) -> list[int]:
        return [_length(row, tokenizer) for row in chunk]

    if num_threads < 2:
        return [length for chunk in chunks for length in count(chunk)]
    with ThreadPoolExecutor(num_threads) as pool:
        return [length for lengths in pool.map(count, chunks) for length in lengths]


def _length(row: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    if row.get("messages"):
        return len(template_ids(tokenizer, row["messages"], add_generation_prompt=True))
    return len(tokenizer.encode(row["prompt"]))
