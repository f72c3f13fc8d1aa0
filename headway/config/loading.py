"""From a file and overrides to an `ExperimentConfig`, or to one error that names everything that is wrong."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.config.experiment import ExperimentConfig
from headway.config.problems import Problem, tell
from headway.config.source import apply_overrides, read_file, resolve
from headway.errors import InvalidInput


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read, resolve and check an experiment file; `a.b=c` overrides win over the file.

    Raises:
        NotFound: There is no such file.
        InvalidInput: Something is wrong; the message lists all of it.
    """
    path = Path(path)
    data, lines, problems = read_file(path)
    problems += apply_overrides(data, overrides)
    data.setdefault("experiment_name", path.stem)
    resolved, more = resolve(data, _defaults())
    problems += more
    try:
        config = ExperimentConfig.model_validate(resolved)
    except ValidationError as error:
        problems += [Problem(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors(include_url=False)]
        raise InvalidInput(tell(path, problems, lines, overrides)) from None
    if problems:
        raise InvalidInput(tell(path, problems, lines, overrides))
    return config


@cache
def _defaults() -> dict[str, Any]:
    return ExperimentConfig().model_dump(mode="json")
