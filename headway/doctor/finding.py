"""What a rule finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much it matters."""

    PROBLEM = "problem"
    """Costs much time, or spoils what is learnt."""
    ADVICE = "advice"
    """Could be better."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    code: str
    """Names the kind: `generation-bound`."""
    severity: Severity
    what: str
    """In a sentence."""
    numbers: Mapping[str, float]
    """What it was judged by."""
    knob: str
    """Key of the experiment file that changes it."""
    direction: str
    """What to do with it: `raise`, `lower`, or in words."""
