"""The supervised phase before the first train step: which rows, in which order, as which tokens.

Decides: rows of `train_dataset` with an answer, in an order seeded by the experiment; a row whose prompt is also one of
`valid_dataset` is never shown. A sequence is the prompt as workflows encode it, the answer, and the end token; answer
and end token carry the loss.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config import ExperimentConfig
from headway.data import Dataset, Row
from headway.errors import InvalidInput
from headway.workflow.api import Tokenizer
from headway.workflow.prompts import PromptEncoder

SEED_SALT = 0x5EED
"""Keeps the order of rows apart from the dataset's own."""
Sequence32 = tuple[NDArray[np.int32], NDArray[np.bool_]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmStartPlan:
    """Everything that the ranks need."""

    sequences: Sequence[Sequence32]
    """([L] token ids, [L] true where the loss is taken) of each distinct row."""
    steps: NDArray[np.int64]
    """[steps, batch size] indices into `sequences`."""
    lr: float
    label_smoothing: float


def plan_warm_start(
    config: ExperimentConfig, train: Dataset, valid: Dataset | None, tokenizer: Tokenizer
) -> WarmStartPlan:
    """Choose and encode the rows of the warm start that `config.warm_start` asks for.

    Raises:
        InvalidInput: No row with an answer is left.
    """
    settings = config.warm_start
    if settings is None:
        raise InvalidInput("warm_start is null: there is nothing to plan")
    rows = usable_rows(train.rows, valid.rows if valid is not None else [])
    if not rows:
        raise InvalidInput(f"warm_start: {train.source} has no row with an `answer` that is not in valid_dataset")
    generator = np.random.Generator(np.random.PCG64([config.seed & (2**64 - 1), SEED_SALT]))
    order = repeated_order(generator, len(rows), settings.steps * settings.batch_size)
    used, steps = np.unique(order, return_inverse=True)
    sequences = encode_rows([rows[int(row)] for row in used], tokenizer)
    return WarmStartPlan(
        sequences, steps.reshape(settings.steps, settings.batch_size), settings.lr, settings.label_smoothing
    )


def usable_rows(train: Sequence[Row], valid: Sequence[Row]) -> list[Row]:
    """Rows with an answer whose prompt is not held out."""
    held_out = {_prompt_key(row) for row in valid}
    return [row for row in train if row.get("answer") is not None and _prompt_key(row) not in held_out]


def repeated_order(generator: np.random.Generator, num_rows: int, num_needed: int) -> NDArray[np.int64]:
    """[num_needed] rows: each once in a random order, then all again in another."""
    rounds = -(-num_needed // num_rows)
    return np.concatenate([generator.permutation(num_rows) for _ in range(max(rounds, 1))])[:num_needed].astype(
        np.int64
    )


def encode_rows(rows: Sequence[Row], tokenizer: Tokenizer) -> list[Sequence32]:
    """Token ids of prompt, answer and end token, and which of them carry the loss.

    Raises:
        InvalidInput: The tokenizer has no end-of-sequence token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise InvalidInput("the tokenizer has no end-of-sequence token: a supervised answer could not end")
    encoder = PromptEncoder(tokenizer)
    return [_encoded(row, encoder, tokenizer, int(end)) for row in rows]


def _encoded(row: Row, encoder: PromptEncoder, tokenizer: Any, end: int) -> Sequence32:
    prompt, _ = encoder.encode(row)
    answer = [*tokenizer.encode(str(row["answer"]), add_special_tokens=False), end]
    ids = np.array(prompt + answer, np.int32)
    mask = np.zeros(len(ids), bool)
    mask[len(prompt) :] = True
    return ids, mask


def _prompt_key(row: Row) -> str:
    return str(row.get("messages") or row.get("prompt"))
