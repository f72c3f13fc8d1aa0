"""Two spellings of one key: refused together, and told as the file writes them."""

from typing import Any

from headway.config.actor import OLD_CAPS
from headway.config.experiment import ExperimentConfig
from headway.config.keys import section_at, value_at, walk
from headway.config.problems import Problem
from headway.config.section import section_class


def take_out_double_spellings(data: dict[str, Any]) -> list[Problem]:
    """Remove one of two keys that say the same thing, and say so."""
    problems = []
    for key, _, field in walk(ExperimentConfig):
        section, (_, holder) = section_class(field.annotation), value_at(data, key)
        if section is None or not isinstance(holder, dict):
            continue
        for old, other in section.doubly_spelt(holder):
            problems.append(Problem(f"{key}.{old}", f"says the same as {key}.{other}, and both are given; keep one"))
            holder.pop(old, None)
    return problems


def as_written(key: str, data: Any) -> str:
    """The key under which a value stands in the data, where the file uses another spelling."""
    if value_at(data, key)[0]:
        return key
    parent, _, name = key.rpartition(".")
    section = section_at(ExperimentConfig, parent)
    spellings = [old for old, new in section.spellings.items() if new == name] if section is not None else []
    if parent == "actor.rejection_sampling":
        parent, spellings = "actor", list(OLD_CAPS if name == "upper" else ("behave_imp_weight_mode",))
    return next((f"{parent}.{s}" for s in spellings if value_at(data, f"{parent}.{s}")[0]), key)
