"""Where prompts come from, how many make a batch, and how often which are evaluated."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from headway.config.section import NoMeaning, NullMeans, Section


class DatasetConfig(Section):
    """A source of rows."""

    path: str = ""
    """Hub id (`openai/gsm8k`), folder, JSONL or Parquet file, `reasoning_gym:NAME` or `python:module.function`."""
    name: str | None = None
    """Configuration of a hub dataset (gsm8k: `main`); null: the dataset's own default."""
    split: str = "train"
    """Split of a hub dataset, or the stem of the file in a local folder."""
    type: Literal["rl"] = "rl"
    """Kind of training that the rows are for."""
    batch_size: PositiveInt = 1
    """Prompts in a batch: what one train step consumes."""
    shuffle: bool = True
    """Another seeded order in every epoch; false: the order of the source."""
    drop_last: bool = True
    """Leave out the rows that do not fill the last batch of an epoch; false: they begin the next one's first batch."""
    max_length: PositiveInt | None = None
    """Longest prompt in tokens, chat template included; longer ones are left out and counted."""
    num_workers: NonNegativeInt = 0
    """Threads that tokenize prompts for the length filter; 0: the loading thread itself."""
    pin_memory: Annotated[bool, NoMeaning("rows travel as tasks, not as tensors")] = False
    """AReaL's DataLoader option."""
    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source: of the `python:` function, of the reasoning-gym task, or of the hub loader."""
    max_rows: PositiveInt | None = None
    """Use only the first so many rows of the source."""


class TrainDatasetConfig(DatasetConfig):
    """The rows to train on."""

    batch_size: Annotated[PositiveInt, NullMeans("rollout.consumer_batch_size")] = 1
    """Prompts in a batch: what one train step consumes."""


class ValidDatasetConfig(DatasetConfig):
    """The rows to evaluate on."""

    split: str = "test"
    """Split of a hub dataset, or the stem of the file in a local folder."""
    shuffle: bool = False
    """Another seeded order in every epoch; false: the order of the source."""
    drop_last: bool = False
    """Leave out the rows that do not fill the last batch."""


class Frequency(Section):
    """When something is done: whenever any of the three is due."""

    experiment_name: str | None = None
    """Repeats the experiment's own; another one is refused."""
    trial_name: str | None = None
    """Repeats the trial's own; another one is refused."""
    fileroot: str | None = None
    """Root of the files of this section; null: `cluster.fileroot`."""
    freq_epochs: PositiveInt | None = None
    """Every so many epochs; null: not by epochs."""
    freq_steps: PositiveInt | None = None
    """Every so many train steps; null: not by steps."""
    freq_secs: PositiveInt | None = None
    """Every so many seconds; null: not by time."""


class SaverConfig(Frequency):
    """Export of the model as a Hugging Face folder, under `checkpoints`."""

    keep_last: PositiveInt | None = None
    """Keep so many of the newest exports; null: all."""


class RecoverConfig(Frequency):
    """Checkpoints from which a run continues after a crash: model, optimizer, random state, cursor, ledger."""

    mode: Literal["disabled", "auto", "fault", "resume"] = "disabled"
    """`disabled` (`off`): none are written, and none are read. `auto` (`on`): continue from the newest complete one
    where there is one. `fault`: as `auto`, but only after a run that did not end well. `resume`: as `auto`, and refuse
    to start without one."""

    @field_validator("mode", mode="before")
    @classmethod
    def _on_and_off(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return "auto" if value else "disabled"
        return {"on": "auto", "off": "disabled"}.get(value, value) if isinstance(value, str) else value

    retries: NonNegativeInt = 3
    """How often `headway up` starts a failed trainer again."""
    keep_last: PositiveInt = 2
    """Keep so many of the newest complete checkpoints."""


class EvaluatorConfig(Frequency):
    """Evaluation on `valid_dataset`, pinned to one version."""

    spellings: ClassVar[Mapping[str, str]] = {"eval_before_train": "at_start"}

    at_start: bool = True
    """Also before the first step."""
    at_end: bool = True
    """Also after the last step."""
    num_samples: PositiveInt = 1
    """Completions for each row; the accuracy is their mean."""
    max_rows: PositiveInt | None = None
    """Evaluate on the first so many rows; null: all."""
