"""The migration guide names keys that exist, and leaves out none that AReaL's example uses."""

import re
from pathlib import Path

from headway.config import ExperimentConfig, load_experiment
from headway.config.keys import field_at, walk
from headway.config.show import plain

GUIDE = Path(__file__).parents[2] / "docs/migrating-from-areal.md"
AREAL = Path(__file__).with_name("areal_files") / "gsm8k_grpo.yaml"
ROW = re.compile(r"^\| (`[^|]+) \|", re.MULTILINE)


def named_keys() -> list[str]:
    """The keys in the first column of the tables of keys."""
    tables = GUIDE.read_text(encoding="utf-8").partition("## The keys")[2]
    return [key for cell in ROW.findall(tables) for key in re.findall(r"`([^`]+)`", cell)]


def test_every_key_in_the_tables_exists() -> None:
    assert [key for key in named_keys() if field_at(ExperimentConfig, key) is None] == []


def test_every_section_and_key_is_in_the_tables() -> None:
    named = named_keys()
    sections = {key for key in named if "." not in key}
    told = {*named, *(key for key, _, _ in walk(ExperimentConfig) if key.partition(".")[0] in sections)}
    top = {key for key, _, _ in walk(ExperimentConfig) if "." not in key}
    assert {key for key in top if not any(name == key or name.startswith(f"{key}.") for name in named)} == set()
    used = {f"actor.{name}" for name in plain(load_experiment(AREAL))["actor"]}
    repeated = {"actor.experiment_name", "actor.trial_name", "actor.backend", "actor.grad_reduce_dtype"}
    assert {key for key in used - repeated if not any(n == key or n.startswith(f"{key}.") for n in told)} == set()
