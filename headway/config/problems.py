"""What is wrong with an experiment file, collected and told all at once."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    key: str
    """Dotted key."""
    message: str
    """What is wrong, with the numbers, and what would be right."""
    line: int | None = None
    """Line in the file, from 1, where it is known already."""
    override: str | None = None
    """The override that is wrong, where it is one."""


def tell(path: Path, problems: Sequence[Problem], lines: Mapping[str, int], overrides: Sequence[str]) -> str:
    """One line for each problem, each with `file:line` or its override, in the order of the file."""
    located = sorted(problems, key=lambda problem: (_line(problem, lines) or 10**9, problem.key))
    told = list(dict.fromkeys(f"{_where(path, p, lines, overrides)}: {p.message}" for p in located))
    if len(told) == 1:
        return told[0]
    return "\n".join([f"{path} has {len(told)} problems:", *(textwrap.indent(line, "  ") for line in told)])


def shown(value: Any) -> str:
    """A value as a message names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if value else "an empty text"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, list(value)[:3])) or 'no keys'}"
    return f"{value!r}"


def _where(path: Path, problem: Problem, lines: Mapping[str, int], overrides: Sequence[str]) -> str:
    """The override or the `file:line` to change, and the key."""
    if problem.override is not None:
        return f"override {problem.override}"
    for text in reversed(overrides):
        name = text.lstrip("+").partition("=")[0].strip()
        if problem.key == name:
            return f"override {text}"
        if problem.key.startswith(f"{name}.") or name.startswith(f"{problem.key}."):
            return f"override {text}: {problem.key}"
    line = _line(problem, lines)
    return f"{path}:{line}: {problem.key}" if line else f"{path}: {problem.key}"


def _line(problem: Problem, lines: Mapping[str, int]) -> int | None:
    """The line of the key, or of the nearest section around it that is in the file."""
    key = problem.key
    while problem.line is None and key and key not in lines:
        key = key.rpartition(".")[0]
    return problem.line if problem.line is not None else lines.get(key)
