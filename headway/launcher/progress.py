"""What `headway up` and `headway status` print: pure functions from the controller's JSON to text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


def progress_line(status: Json, total_steps: int, seconds_left: float | None, trainer_phase: str) -> str:
    """One line: step, reward, held-out, staleness now / bound, samples a second, time left.

    Example:
        >>> step = {"step": 3, "stats": {"ppo_actor/task_reward/avg": 0.5, "rollout/staleness/avg": 1.25,
        ...         "rollout/staleness/max": 2.0, "throughput/samples_per_s": 400.0}}
        >>> progress_line({"last_step": step, "staleness": {"eta": 2}}, 10, 9.0, "training")
        'step 4/10  reward 0.500  staleness avg 1.25 max 2 bound 2  400 samples/s  0:09 left  training'
    """
    step = status.get("last_step")
    if step is None:
        return f"step 0/{total_steps}  {trainer_phase}"
    stats, done = step["stats"], step["step"] + 1
    parts = [f"step {done}/{total_steps}", f"reward {stats.get('ppo_actor/task_reward/avg', 0.0):.3f}"]
    evaluation = status.get("last_evaluation")
    if evaluation is not None and evaluation["reward"] is not None:
        parts.append(f"held-out {evaluation['reward']:.3f} at step {evaluation['step']}")
    average, largest = stats.get("rollout/staleness/avg", 0.0), stats.get("rollout/staleness/max", 0.0)
    parts += [
        f"staleness avg {average:.2f} max {largest:.0f} bound {status['staleness']['eta']}",
        f"{stats.get('throughput/samples_per_s', 0.0):.0f} samples/s",
        "" if seconds_left is None else f"{clock(seconds_left)} left",
        trainer_phase,
    ]
    return "  ".join(filter(None, parts))


def clock(seconds: float) -> str:
    """Minutes and seconds.

    Example:
        >>> clock(75.2)
        '1:15'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def summary_text(summary: Json, folder: Path) -> str:
    """The last lines of a run."""
    lines = [f"{summary['num_steps']} steps in {summary['wall_s']:.0f} s"]
    if summary["held_out"]:
        lines.append(f"held-out reward {summary['held_out_before']:.3f} -> {summary['held_out_after']:.3f}")
    staleness = summary["staleness"]
    tokens = ", ".join(f"{number} at {age}" for age, number in staleness["gradient_tokens"].items())
    lines.append(f"tokens trained on by staleness (bound {staleness['eta']}): {tokens}")
    discards = ", ".join(f"{one['count']} {reason}" for reason, one in summary["discards"].items())
    lines.append(
        f"discards: {discards or 'none'}; tasks conserved: {'yes' if summary['tasks']['is_conserved'] else 'NO'}"
    )
    lines.append(f"report: {folder / 'report.html'}   dashboard and trajectories: headway view {folder}")
    return "\n".join(lines)


def status_text(status: Json) -> str:
    """The whole status for people, a section a paragraph."""
    sections = [
        f"run {status['run']}, version {status['published_version'] or 'none yet'}, {status['num_steps']} steps",
        _services(status),
        _servers(status),
        _tasks(status),
        _staleness(status),
        _waits(status),
    ]
    return "\n\n".join(section for section in sections if section)


def table(title: str, rows: list[tuple[str, ...]]) -> str:
    """Rows in columns under a title; empty without rows."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _services(status: Json) -> str:
    rows: list[tuple[str, ...]] = [(service["name"], service["address"]) for service in status["services"]]
    return table("services", rows)


def _servers(status: Json) -> str:
    rows: list[tuple[str, ...]] = [
        (
            server["name"],
            server["state"],
            server["served_version"] or "-",
            f"{server['num_requests']} requests",
            server["detail"],
        )
        for server in status["servers"]
    ]
    return table("engines", rows)


def _tasks(status: Json) -> str:
    tasks = status["tasks"]
    counts = "  ".join(f"{name} {number}" for name, number in tasks.items() if name != "is_conserved")
    lines = ["tasks", f"  {counts}", f"  conserved: {'yes' if tasks['is_conserved'] else 'NO'}"]
    for reason, discard in status["discards"].items():
        example = discard["examples"][-1]["message"] if discard["examples"] else ""
        lines.append(f"  discarded {discard['count']} {reason}: {example}".rstrip(": "))
    return "\n".join(lines)


def _staleness(status: Json) -> str:
    staleness = status["staleness"]
    lines = [
        "staleness",
        f"  bound {staleness['eta']} ({staleness['policy']}), {staleness['outstanding']} of {staleness['limit']} "
        f"groups outstanding, {staleness['capacity']} may start",
    ]
    if staleness["holds_back"]:
        lines.append(f"  held back by {staleness['holds_back']}")
    return "\n".join(lines)


def _waits(status: Json) -> str:
    return table("waiting for", [(wait["what"], f"{wait['since_s']:.1f} s") for wait in status["waits"]])
