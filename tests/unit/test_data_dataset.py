"""Every row is used or counted, an order can be taken up anywhere, and a dataset is never empty."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import TrainDatasetConfig
from headway.data import Cursor, Dataset, open_dataset
from headway.errors import InvalidInput

PROMPTS: list[dict[str, Any]] = [{"prompt": "x" * length, "answer": str(length)} for length in (3, 9, 1, 0, 5, 7)]


class Letters:
    """A tokenizer of one token a letter; its chat template adds two tokens."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        return {"input_ids": [1, *self.encode("".join(message["content"] for message in conversation)), 2]}


def rows() -> list[dict[str, Any]]:
    return PROMPTS


def numbered(size: int) -> list[dict[str, Any]]:
    return [{"prompt": str(number)} for number in range(size)]


def gsm8k() -> list[dict[str, Any]]:
    return [{"question": "How many?", "answer": "One and one.\n#### 2"}]


def problems() -> list[dict[str, Any]]:
    return [{"problem": "Solve.", "solution": "x = 2", "level": 3}]


def chat_in_prompt() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "Hello"}]


def nothing() -> list[dict[str, Any]]:
    return []


def no_prompt() -> list[dict[str, Any]]:
    return [{"text": "Hi", "label": 1}]


def bytes_inside() -> list[dict[str, Any]]:
    return [{"prompt": "Hi", "image": b"\xff"}]


def dataset(function: str, seed: int = 1, tokenizer: Letters | None = None, **settings: Any) -> Dataset:
    config = TrainDatasetConfig(path=f"python:{__name__}.{function}", **settings)
    return open_dataset(config, tokenizer, seed)


def ids(found: Dataset, cursor: Cursor, count: int) -> list[str]:
    return [task.task_id for task in itertools.islice(found.tasks(cursor), count)]


def test_long_prompts_are_left_out_counted_and_reported() -> None:
    found = dataset("rows", tokenizer=Letters(), max_length=5)
    assert [row["prompt"] for row in found.rows] == ["xxx", "x", "xxxxx"]
    assert (found.left_out.too_long, found.left_out.no_prompt, found.left_out.longest) == (2, 1, 9)
    assert len(found) + found.left_out.total == len(PROMPTS)
    assert found.report().endswith(
        "3 rows, prompts of 1 to 5 tokens; 2 left out with prompts longer than max_length 5 (up to 9); "
        "1 left out without a prompt"
    )


def test_the_chat_template_counts() -> None:
    found = dataset("gsm8k", tokenizer=Letters())
    content = found.rows[0]["messages"][0]["content"]
    assert found.prompt_lengths.tolist() == [len(content) + 2]


def test_threads_count_the_same_tokens() -> None:
    settings: dict[str, Any] = {"dataset_kwargs": {"size": 1000}, "tokenizer": Letters()}
    one, four = dataset("numbered", **settings), dataset("numbered", num_workers=4, **settings)
    assert one.prompt_lengths.tolist() == four.prompt_lengths.tolist()


def test_task_ids_name_rows_of_the_source_whatever_is_left_out() -> None:
    found = dataset("rows", tokenizer=Letters(), max_length=5, shuffle=False)
    assert ids(found, Cursor(), 4) == ["0/0", "0/2", "0/4", "1/0"]
    assert found.data_of("7/4") == PROMPTS[4]
    assert found.longest_prompt() == ("0/4", 5)
    for wrong in ("7/1", "7", "a/1", "7/9"):
        with pytest.raises(InvalidInput, match="task"):
            found.data_of(wrong)


@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 90))
def test_a_cursor_takes_up_the_order_where_it_was_left(
    size: int, batch: int, drop_last: bool, shuffle: bool, taken: int
) -> None:
    settings: dict[str, Any] = {"batch_size": min(batch, size), "drop_last": drop_last, "shuffle": shuffle}
    found = dataset("numbered", dataset_kwargs={"size": size}, **settings)
    tasks = list(itertools.islice(found.tasks(), taken + 20))
    cursor = Cursor(*tuple(tasks[taken - 1].after)) if taken else Cursor()
    again = dataset("numbered", dataset_kwargs={"size": size}, **settings)
    assert ids(again, cursor, 20) == [task.task_id for task in tasks[taken:]]


@given(st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_an_epoch_holds_every_row_once_or_whole_batches_only(size: int, batch: int, drop_last: bool) -> None:
    batch = min(batch, size)
    found = dataset("numbered", dataset_kwargs={"size": size}, batch_size=batch, drop_last=drop_last)
    assert found.tasks_per_epoch == (size - size % batch if drop_last else size)
    epochs = Counter(
        task.task_id.partition("/")[0] for task in itertools.islice(found.tasks(), 2 * found.tasks_per_epoch)
    )
    assert epochs == {"0": found.tasks_per_epoch, "1": found.tasks_per_epoch}
    assert len(set(ids(found, Cursor(), found.tasks_per_epoch))) == found.tasks_per_epoch


def test_seeds_give_other_orders() -> None:
    first, second = (dataset("numbered", seed, dataset_kwargs={"size": 30}) for seed in (1, 2))
    assert ids(first, Cursor(), 30) != ids(second, Cursor(), 30)


def test_a_dataset_without_rows_is_an_error_with_the_counts() -> None:
    with pytest.raises(InvalidInput, match="has no rows"):
        dataset("nothing")
    with pytest.raises(InvalidInput, match=r"none of 6 rows is left: 5 prompts are longer .* 1 rows have no prompt"):
        dataset("chat_rows_too_long", tokenizer=Letters(), max_length=1)
    with pytest.raises(InvalidInput, match="6 rows do not fill one batch of 7"):
        dataset("numbered", dataset_kwargs={"size": 6}, batch_size=7)
    with pytest.raises(InvalidInput, match="needs a tokenizer"):
        dataset("rows", max_length=3)


def chat_rows_too_long() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": row["prompt"]}] if row["prompt"] else []} for row in PROMPTS]


def test_gsm8k_becomes_a_chat_that_asks_for_a_boxed_answer() -> None:
    [row] = dataset("gsm8k").rows
    assert row["messages"] == [{"role": "user", "content": "How many?\nPlease put your final answer within \\boxed{}."}]
    assert row["answer"] == "One and one.\n#### 2"


def test_common_columns_become_a_chat_and_an_answer_and_others_stay() -> None:
    assert dataset("problems").rows[0] == {
        "messages": [{"role": "user", "content": "Solve."}],
        "answer": "x = 2",
        "level": 3,
    }
    assert dataset("chat_in_prompt").rows[0] == {"messages": [{"role": "user", "content": "Hi"}], "answer": "Hello"}


def test_rows_without_anything_that_can_be_a_prompt_are_refused_with_their_columns() -> None:
    with pytest.raises(InvalidInput, match="no column can be a prompt: rows have label, text"):
        dataset("no_prompt")


def test_rows_that_cannot_travel_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"row 0 cannot be sent as JSON"):
        dataset("bytes_inside")


def test_a_task_travels_as_json() -> None:
    task = next(dataset("numbered", dataset_kwargs={"size": 1}).tasks())
    assert task.data_json == b'{"prompt":"0"}'
