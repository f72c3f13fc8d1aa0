"""With which parameters an answer is sampled: those of the experiment, and what a client may change of them.

Training recomputes log-probabilities at the experiment's temperature, so samples made at another one would be weighted
wrongly. With `Rule.EXPERIMENT` a client's temperature, top_p, top_k and frequency penalty therefore do not count; which
ones did not is told with the answer. A client can always ask for less: fewer tokens, more stop strings.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headway.config.rollout import GenerationHyperparameters


class Rule(StrEnum):
    """Whose temperature counts."""

    EXPERIMENT = "experiment"
    """The experiment's `gconfig`."""
    CLIENT = "client"
    """The request's, where it has one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of sampling; None: nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] = ()

    def own(self) -> dict[str, Any]:
        """What it says beside the number of tokens and the stop strings."""
        names = ("temperature", "top_p", "top_k", "frequency_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def combine(
    gconfig: GenerationHyperparameters, asked: Asked, rule: Rule, budget: int
) -> tuple[GenerationHyperparameters, dict[str, Any]]:
    """The parameters of an answer, and those of the client that do not count.

    Args:
        budget: Tokens that the session may still generate on this branch.
    """
    changes: dict[str, Any] = {
        "max_new_tokens": min(budget, asked.max_tokens or budget),
        "stop": [*(gconfig.stop or ()), *asked.stop] or None,
    }
    own = asked.own()
    if rule is Rule.CLIENT:
        is_greedy = gconfig.greedy if asked.temperature is None else asked.temperature == 0
        return gconfig.model_copy(update={**changes, **own, "greedy": is_greedy}), {}
    return gconfig.model_copy(update=changes), {n: v for n, v in own.items() if v != getattr(gconfig, n)}


def cut_at_stop_string(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the first stop string that a client asked for, and which one it was.

    Example:
        >>> cut_at_stop_string("42 END and so on", ("END", "on"))
        ('42 ', 'END')
    """
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop
