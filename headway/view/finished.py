"""A run that is over, from its files, in the answers that the controller gave while it went on.

    answers.json    left by `headway up` at the end: the last status, the timeline, evaluations
    stats.jsonl     left by every trainer: the numbers of each step

Of a run that ended otherwise there are the numbers alone; the status is then what these say.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from headway.view.folder import RunFolder

Json = dict[str, Any]
ANSWERS = "answers.json"
REPORT = "/v1/report"
KEPT: dict[str, Json] = {
    "/v1/timeline": {"now": 0.0, "lanes": []},
    "/v1/evaluations": {"running": [], "ended": []},
    "/v1/versions": {"versions": [], "next": None},
}
"""What else is kept of a controller when a run ends, by path, and what is answered where it was not."""
AGE = "ppo_actor/staleness_tokens/"
NO_NUMBERS = {"step", "version", "time"}


class FinishedRun:
    """Answers from files, read once.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._name = folder.name
        self._answers: Json = _read(folder.run / ANSWERS)
        self._records = list(_records(folder.logs / "stats.jsonl"))
        self._names = sorted({name for record in self._records for name in record} - NO_NUMBERS)

    def answer(self, path: str) -> Json:
        """What the controller answered last at one of `KEPT`."""
        found: Json = self._answers.get(path, KEPT[path])
        return found

    def status(self) -> Json:
        """The last status."""
        report = self._answers.get(REPORT)
        if report is None:
            return status_of(self._name, self._records)
        return {name: value for name, value in report.items() if name not in ("history", "evaluations")}

    def history(self, names: Sequence[str], since_step: int, limit: int) -> Json:
        """Numbers over the steps, as `/v1/metrics/history` has them."""
        records = [record for record in self._records if record["step"] >= since_step]
        series = [{"name": name, "points": _points(records[:limit], name)} for name in names]
        return {
            "names": self._names,
            "series": [one for one in series if one["points"]],
            "next_step": records[limit]["step"] if len(records) > limit else None,
        }


def status_of(name: str, records: Sequence[Json]) -> Json:
    """A status of what the numbers of the steps say; the rest of it is empty."""
    last: Json = records[-1] if records else {"step": 0}
    groups = round(sum(record.get("rollout/groups", 0) for record in records))
    tasks = dict.fromkeys(("pending", "running", "saving", "ready", "leased", "rejected", "quarantined"), 0)
    timing = dict.fromkeys(("pending_s", "rollout_s", "generate_s", "reward_s", "other_s", "journal_s"), 0.0)
    bound = dict.fromkeys(("outstanding", "limit", "max_concurrent", "capacity"), 0)
    ages = [int(key.removeprefix(AGE)) for key in last if key.startswith(AGE)]
    return {
        "run": name,
        "published_version": last.get("version"),
        "servers": [],
        "services": [],
        "tasks": {**tasks, "submitted": groups, "consumed": groups, "is_conserved": True},
        "discards": {},
        "num_rollouts": {},
        "quarantined": {},
        "waits": [],
        "num_steps": last["step"],
        "total_steps": last.get("total_steps"),
        "has_ended": True,
        "last_step": {"step": last["step"] - 1, "stats": {k: v for k, v in last.items() if k not in NO_NUMBERS}},
        "tokens": {"gradient": _tokens_by_age(records), "masked": {}},
        "staleness": {
            **bound,
            "policy": "unknown",
            "eta": max(ages, default=0),
            "batch_size": round(last.get("rollout/groups", 0)),
            "served_step": last["step"],
            "holds_back": "",
        },
        "timing": {"num_groups": 0, **timing},
    }


def _points(records: Sequence[Json], name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def _tokens_by_age(records: Sequence[Json]) -> dict[str, int]:
    found: dict[str, float] = {}
    for record in records:
        for key in record:
            if key.startswith(AGE):
                found[key.removeprefix(AGE)] = found.get(key.removeprefix(AGE), 0.0) + record[key]
    return {age: round(number) for age, number in found.items() if number}


def _read(path: Path) -> Json:
    found: Json = orjson.loads(path.read_bytes()) if path.exists() else {}
    return found


def _records(path: Path) -> Iterator[Json]:
    """The whole lines; a torn last one is left out."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield orjson.loads(line)
