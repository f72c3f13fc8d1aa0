"""What is wrong with an experiment file, collected and told all at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    told = list(dict.fromkeys(f"{_where(path, p, lines, overrides)}: {p.key}: {p.message}" for p in located))
    if len(told) == 1:
        return told[0]
    return "\n".join([f"{path} has {len(told)} problems:", *(f"  {line}" for line in told)])


def _where(path: Path, problem: Problem, lines: Mapping[str, int], overrides: Sequence[str]) -> str:
    if problem.override is not None:
        return f"override {problem.override}"
    for text in reversed(overrides):
        name = text.lstrip("+").partition("=")[0].strip()
        if problem.key == name or problem.key.startswith(name + "."):
            return f"override {text}"
    line = _line(problem, lines)
    return f"{path}:{line}" if line else f"{path}"


def _line(problem: Problem, lines: Mapping[str, int]) -> int | None:
    """The line of the key, or of the nearest section around it that is in the file."""
    key = problem.key
    while problem.line is None and key and key not in lines:
        key = key.rpartition(".")[0]
    return problem.line if problem.line is not None else lines.get(key)
