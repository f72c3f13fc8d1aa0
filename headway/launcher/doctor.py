"""`headway doctor`: the evidence of a running controller or of a run's folder; findings for people and for programs.

A folder is that of `headway up`: `answers.json` has the controller's last report. A run that was cut off has none; then
the statistics stand in for it, which know nothing of engines, rewards and discards.
"""

import dataclasses
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from headway.config import load_experiment
from headway.doctor import Evidence, Finding, Severity, diagnose
from headway.errors import InvalidInput, NotFound
from headway.launcher.rest import fetch

ANSWERS, REPORT = "answers.json", "/v1/report"


async def evidence_of(source: str) -> Evidence:
    """What is known of a run.

    Args:
        source: The controller's URL, or the folder of a run.

    Raises:
        Unavailable: Nothing answers at the URL.
        InvalidInput: What answers is no controller.
        NotFound: The folder is not that of a run.
    """
    if "://" in source:
        return _evidence(await fetch(f"{source.rstrip('/')}{REPORT}"), source)
    return evidence_in(Path(source))


def evidence_in(folder: Path) -> Evidence:
    """What a run's folder tells.

    Raises:
        NotFound: It is not that of a run.
        InvalidInput: Its files are damaged.
    """
    if (answers := folder / ANSWERS).is_file():
        return _evidence(_read(answers).get(REPORT), str(answers))
    if not (file := folder / "config.yaml").is_file():
        raise NotFound(f"{folder} is neither the URL of a controller nor the folder of a run: it has no config.yaml")
    config = load_experiment(file, [])
    statistics = config.paths.logs / "stats.jsonl"
    if not statistics.is_file():
        raise NotFound(f"{statistics} is not there: the run in {folder} has made no step")
    records = [orjson.loads(line) for line in statistics.read_bytes().splitlines() if line.endswith(b"}")]
    return Evidence.of_statistics(records, config.rollout.max_head_offpolicyness)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{file} is damaged: {error}") from error
    return found


def _evidence(report: Any, where: str) -> Evidence:
    if not isinstance(report, dict) or not {"history", "staleness"} <= report.keys():
        raise InvalidInput(f"{where} has no report of a rollout-controller")
    return Evidence(report)


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """For programs."""
    return [dataclasses.asdict(finding) for finding in findings]


def show(evidence: Evidence, findings: list[Finding], console: Console) -> None:
    """For people: problems first, each with its numbers and its knob."""
    if not evidence.is_enough:
        console.print(f"{len(evidence.steps)} steps after the first: too early to judge how steps go")
    for finding in findings:
        colour = "red" if finding.severity is Severity.PROBLEM else "yellow"
        console.print(Text.assemble((f"{finding.severity}  {finding.code}", f"bold {colour}"), f"  {finding.what}"))
        numbers = "; ".join(f"{name}: {value:.3g}" for name, value in finding.numbers.items())
        console.print(Text(f"    {numbers}\n    {finding.knob}: {finding.direction}", style="dim"))
    if not findings:
        console.print("nothing is found to be wrong")


def problems_text(report: dict[str, Any]) -> str:
    """One line for each problem of a run that has ended; empty without any."""
    found = [one for one in diagnose(Evidence(report)) if one.severity is Severity.PROBLEM]
    return "\n".join(f"doctor: {one.code}: {one.what} ({one.knob}: {one.direction})" for one in found)
