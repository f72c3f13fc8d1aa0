"""A configuration for people: resolved, secrets masked, saved with the run, compared with another one."""

import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from headway.config.experiment import ExperimentConfig
from headway.config.secrets import masked

HEADER = "# The experiment as it was run: overrides applied, everything resolved, secrets masked.\n"


def plain(config: ExperimentConfig) -> dict[str, Any]:
    """Plain data that loads as an equal configuration, but for its secrets, which are masked."""
    data: dict[str, Any] = config.model_dump(mode="json")
    if config.rollout.backend is not None:
        data.pop("allocation_mode")
    cleaned: dict[str, Any] = masked(data)
    return cleaned


def save_resolved(config: ExperimentConfig, path: Path) -> None:
    """Write the configuration as YAML, secrets masked; the file is complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(HEADER + yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    aside.replace(path)


def shown_config(config: ExperimentConfig, given: Set[str]) -> Text:
    """YAML in which what the file does not set is dimmed."""
    text = Text()
    for line, key in _lines(plain(config), ""):
        is_set = key in given or any(
            key.startswith(f"{parent}.") for parent in given if not _has_children(parent, given)
        )
        text.append(line + "\n", style="" if is_set else "dim")
    return text


def differences(a: ExperimentConfig, b: ExperimentConfig) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) of everything that differs; None also where there is no such key."""
    in_a, in_b = dict(_values(plain(a), "")), dict(_values(plain(b), ""))
    keys = [*in_a, *(key for key in in_b if key not in in_a)]
    return [(key, in_a.get(key), in_b.get(key)) for key in keys if in_a.get(key) != in_b.get(key)]


def _has_children(key: str, given: Set[str]) -> bool:
    return any(other.startswith(f"{key}.") for other in given)


def _lines(data: dict[str, Any], prefix: str, indent: str = "") -> Iterator[tuple[str, str]]:
    """(line of YAML, dotted key) of every key, lists in one line."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", key
            yield from _lines(value, f"{key}.", f"{indent}  ")
        else:
            yield f"{indent}{name}: {inline(value)}", key


def _values(data: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
