"""What rules judge by: the controller's `/v1/report`, asked for or as `headway up` kept it, or `stats.jsonl`.

Numbers of steps are means over a window: the last steps of the run, or its first ones. The very first step is left
out: services start, caches are empty.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway.doctor.statistics import FRACTION, Statistic

Json = Mapping[str, Any]
WINDOW = 20
MIN_STEPS = 5
"""Fewer say nothing yet."""
MIN_ROLLOUTS = 50
"""With fewer, 5 % of them are one or two: chance."""


@dataclass(frozen=True)
class Evidence:
    """A report, read."""

    report: Json
    """As `/v1/report` is; of a run without one: `history`, and `staleness` with `eta`."""

    @classmethod
    def of_statistics(cls, records: Iterable[Json], eta: int) -> "Evidence":
        """From the lines of `stats.jsonl`."""
        history = [{"version": record["version"], "stats": record} for record in records if Statistic.STEP in record]
        return cls({"history": history, "staleness": {"eta": eta}})

    @cached_property
    def steps(self) -> Sequence[Json]:
        """Statistics of the committed steps but the first, oldest first."""
        committed = [step for step in self.report["history"] if step.get("version") is not None]
        return [step["stats"] for step in committed if not step.get("is_skipped")][1:]

    @property
    def is_enough(self) -> bool:
        """Whether there are steps enough to say anything of steps."""
        return len(self.steps) >= MIN_STEPS

    @property
    def _window(self) -> int:
        return min(WINDOW, max(1, len(self.steps) // 2))

    def recent(self, name: str) -> float | None:
        """Mean of a statistic over the last steps; None: it is not known."""
        return _mean(self.steps[-self._window :], name)

    def early(self, name: str) -> float | None:
        """Mean over the first steps."""
        return _mean(self.steps[: self._window], name)

    @property
    def waited(self) -> float | None:
        """Part of the trainer's time in the last steps in which it waited for its batch."""
        part, whole = self.recent(Statistic.WAITED), self.recent(Statistic.STEP)
        return None if not whole else (part or 0.0) / whole

    @property
    def num_rollouts(self) -> int:
        """Rollouts that have ended, however; 0: not known."""
        return sum(self.section("num_rollouts").values())

    @property
    def eta(self) -> int:
        return int(self.report["staleness"]["eta"])

    @property
    def staleness(self) -> Json:
        found: Json = self.report["staleness"]
        return found

    def section(self, name: str) -> Any:
        """A part of the report; empty where it is not known."""
        return self.report.get(name) or {}

    @property
    def servers(self) -> Sequence[Json]:
        return self.report.get("servers") or ()

    @property
    def bound_share(self) -> float | None:
        """Part of the tokens trained on lately that were exactly as old as the bound allows."""
        return self.recent(f"{FRACTION}{self.eta}")


def _mean(steps: Sequence[Json], name: str) -> float | None:
    values = [float(step[name]) for step in steps if name in step]
    return sum(values) / len(values) if values else None
