"""What is trained and evaluated on, read and planned before anything runs."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

from headway.config import ExperimentConfig
from headway.data import Dataset, Task, open_dataset
from headway.errors import InvalidInput
from services.trainer.schedule import RunLength
from services.trainer.warm_start import WarmStartPlan, plan_warm_start


@dataclass(frozen=True)
class Data:
    """What is trained and evaluated on."""

    train: Dataset
    length: RunLength
    evaluation_tasks: list[Task]
    warm_start: WarmStartPlan | None


def open_data(config: ExperimentConfig) -> Data:
    """Read the datasets, and plan what follows from them.

    Raises:
        InvalidInput: They cannot be read, or do not fit the rest of the file.
    """
    tokenizer = load_tokenizer(config.tokenizer_path)
    train = open_dataset(config.train_dataset, tokenizer, config.seed)
    valid = open_dataset(config.valid_dataset, tokenizer, config.seed) if config.valid_dataset is not None else None
    check_longest(config, train)
    length = RunLength.of(config, train.tasks_per_epoch)
    plan = plan_warm_start(config, train, valid, tokenizer) if config.warm_start is not None else None
    return Data(train, length, evaluation_tasks(config, valid), plan)


def load_tokenizer(path: str) -> Any:
    """A transformers tokenizer.

    Raises:
        InvalidInput: There is none at `path`.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInput(f"tokenizer_path {path}: no tokenizer can be loaded there: {reason}") from error


def check_longest(config: ExperimentConfig, train: Dataset) -> None:
    """Refuse, before anything runs, prompts whose completion would fit into no micro-batch.

    Raises:
        InvalidInput: Names the task.
    """
    budget = config.actor.mb_spec.max_tokens_per_mb
    task_id, prompt_tokens = train.longest_prompt()
    longest = min(prompt_tokens + config.gconfig.max_new_tokens, config.gconfig.max_tokens)
    if budget is not None and longest > budget:
        raise InvalidInput(
            f"task {task_id} has a prompt of {prompt_tokens} tokens; with gconfig.max_new_tokens "
            f"({config.gconfig.max_new_tokens}) that is more than actor.mb_spec.max_tokens_per_mb ({budget}); "
            f"raise it, or set train_dataset.max_length"
        )


def evaluation_tasks(config: ExperimentConfig, valid: Dataset | None) -> list[Task]:
    """The rows that are evaluated on, as tasks."""
    if valid is None:
        return []
    limit = min(valid.tasks_per_epoch, config.evaluator.max_rows or valid.tasks_per_epoch)
    return list(islice(valid.tasks(), limit))
