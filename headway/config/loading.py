"""From a file and overrides to an `ExperimentConfig`, or to one error that names everything that is wrong.

    file -> YAML with lines -> overrides -> ${...} resolved -> AReaL's foreign keys taken out -> types -> checks

No step stops at its first problem: what one step finds is put at its default, and the next one goes on.
"""

import logging
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.config.checks import Conflict, check_all, check_allocation, missing
from headway.config.experiment import ExperimentConfig
from headway.config.flags import unknown_flags
from headway.config.foreign import take_out
from headway.config.keys import field_at, value_at
from headway.config.problems import Problem, tell
from headway.config.secrets import without_masks
from headway.config.section import NoMeaning
from headway.config.source import apply_overrides, read_file, resolve, take_out_scalars
from headway.config.spelling import as_written, take_out_double_spellings
from headway.config.translate import translate, without
from headway.config.unread import UNREAD
from headway.errors import InvalidInput

log = logging.getLogger(__name__)
INDEX = re.compile(r"\.\d+")
WHOLE_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
ATTEMPTS = 5
"""How often a file is validated again without what was found wrong: each time shows what the last one could not see."""


@dataclass(frozen=True)
class Experiment:
    """A file that has been read, with what there is to say about it."""

    config: ExperimentConfig
    notes: tuple[str, ...]
    """`key: what to know`, in the order of the file: keys without meaning here, numbers that can never matter."""
    given: frozenset[str]
    """Dotted keys that the file or an override sets; all others are defaults."""


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read, resolve and check an experiment file; `a.b=c` overrides win over the file.

    Raises:
        NotFound: There is no such file.
        InvalidInput: Something is wrong; the message lists all of it.
    """
    experiment = read_experiment(path, overrides)
    for note in experiment.notes:
        log.info("%s: %s", path, note)
    return experiment.config


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """As `load_experiment`, and tells what else there is to know about the file.

    Raises:
        NotFound: There is no such file.
        InvalidInput: Something is wrong; the message lists all of it.
    """
    path = Path(path)
    data, lines, problems = read_file(path)
    problems += apply_overrides(data, overrides)
    data.setdefault("experiment_name", path.stem)
    problems += take_out_scalars(data, _defaults())
    resolved, unresolved = resolve(data, _defaults())
    notes, refused = take_out(resolved := without_masks(resolved))
    refused += take_out_double_spellings(resolved)
    given = _given(resolved)
    config, wrong = _validated(resolved, given)
    problems += [*unresolved, *refused, *wrong]
    if config is not None:
        conflicts = _conflicts(config, given, {problem.key for problem in problems})
        told = [(as_written(conflict.keys[0], resolved), conflict) for conflict in conflicts]
        problems += [Problem(key, conflict.message) for key, conflict in told if not conflict.is_note]
        notes += [(key, conflict.message) for key, conflict in told if conflict.is_note]
        notes += _without_effect(resolved, given) + unknown_flags(config)
    if problems or config is None:
        first = {problem.key: problem for problem in reversed(problems)}
        told_problems = [problem for key, problem in first.items() if not _is_echo(key, data, first.keys())]
        raise InvalidInput(tell(path, told_problems, lines, overrides))
    keys = {key for key, _ in notes}
    order = sorted(dict.fromkeys(notes), key=lambda note: lines.get(note[0], 0))
    told_notes = tuple(f"{key}: {why}" for key, why in order if not _is_echo(key, data, keys))
    return Experiment(config, told_notes, frozenset(given))


def require_runnable(config: ExperimentConfig) -> None:
    """Refuse a file that can be read, but names no model or no rows.

    Raises:
        InvalidInput: With every key that is missing.
    """
    if absent := missing(config):
        raise InvalidInput("; ".join(f"{conflict.keys[0]} {conflict.message}" for conflict in absent))


def _validated(data: Mapping[str, Any], given: Set[str]) -> tuple[ExperimentConfig | None, list[Problem]]:
    """The configuration, with everything that is wrong at its default, and what is wrong."""
    found: list[Problem] = []
    for _ in range(ATTEMPTS):
        try:
            config = ExperimentConfig.model_validate(data)
            problems = [Problem(conflict.keys[0], conflict.message) for conflict in check_allocation(config, given)]
        except ValidationError as error:
            config, problems = None, translate(error, data)
        if not problems:
            return config, found
        found += [problem for problem in problems if problem not in found]
        data = without(data, problems)
    return None, found


def _conflicts(config: ExperimentConfig, given: Set[str], broken: Set[str]) -> list[Conflict]:
    """What contradicts itself among the keys that are not broken already."""
    return [
        conflict
        for conflict in check_all(config, given)
        if not any(_touches(key, other) for key in conflict.keys for other in broken)
    ]


def _is_echo(key: str, written: Any, others: Set[str]) -> bool:
    """Whether a key only repeats one of the others: it, or a section around it, is written as `${...}`."""
    parts = key.split(".")
    for depth in range(len(parts)):
        found, value = value_at(written, ".".join(parts[: depth + 1]))
        if not found:
            return False
        if isinstance(value, str) and (source := WHOLE_INTERPOLATION.fullmatch(value)):
            return ".".join([source[1], *parts[depth + 1 :]]) in others
    return False


def _touches(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def _given(data: Any, prefix: str = "") -> set[str]:
    """Every dotted key in the data, sections too."""
    keys: set[str] = set()
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        keys |= {f"{prefix}{name}"} | _given(value, f"{prefix}{name}.")
    return keys


def _without_effect(data: Any, given: Set[str]) -> list[tuple[str, str]]:
    """(key, why) of every key that is set to anything but its default, and that nothing here follows."""
    notes = []
    for key in sorted(given):
        field = field_at(ExperimentConfig, key)
        if field is None or value_at(data, key)[1] == field.get_default(call_default_factory=False):
            continue
        marks = [mark.why for mark in field.metadata if isinstance(mark, NoMeaning)]
        if marks or INDEX.sub(".0", key) in UNREAD:
            notes.append((key, marks[0] if marks else "nothing acts on it in this version"))
    return notes


@cache
def _defaults() -> dict[str, Any]:
    return ExperimentConfig().model_dump(mode="json")
