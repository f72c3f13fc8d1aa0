"""The report of a run: `report.json` for programs, `report.html` for people, from the controller's `/v1/report`."""

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, StrictUndefined

Json = Mapping[str, Any]
REWARD, HELD_OUT = "ppo_actor/task_reward/avg", "eval/task_reward/avg"
TIMING = "timing/"


def summarize(report: Json, wall_s: float) -> dict[str, Any]:
    """The numbers of a whole run.

    Args:
        report: The controller's report.
        wall_s: From the start of the launch to the end of training, seconds.
    """
    steps = [step for step in report["history"] if step["version"] is not None]
    held_out = evaluations(report)
    return {
        "run": report["run"],
        "wall_s": wall_s,
        "num_steps": len(steps),
        "held_out": held_out,
        "held_out_before": held_out[0]["reward"] if held_out else None,
        "held_out_after": held_out[-1]["reward"] if held_out else None,
        "reward": [{"step": step["step"], "reward": step["stats"].get(REWARD)} for step in steps],
        "staleness": {
            "eta": report["staleness"]["eta"],
            "policy": report["staleness"]["policy"],
            "gradient_tokens": report["tokens"]["gradient"],
            "masked_tokens": report["tokens"]["masked"],
        },
        "trainer_s": trainer_seconds(steps),
        "rollout_s": report["timing"],
        "rollouts": report["num_rollouts"],
        "discards": report["discards"],
        "tasks": report["tasks"],
        "steps": steps,
    }


def evaluations(report: Json) -> list[dict[str, Any]]:
    """Held-out results, oldest first: the step of the version that was evaluated, and its mean reward."""
    found = {step["step"] + 1: step["stats"].get(HELD_OUT) for step in report["history"]}
    found |= {one["step"]: one["reward"] for one in report["evaluations"]}
    return [{"step": step, "reward": reward} for step, reward in sorted(found.items()) if reward is not None]


def trainer_seconds(steps: Sequence[Json]) -> dict[str, float]:
    """Seconds of the trainer by phase over all steps, largest first."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, seconds in step["stats"].items():
            if name.startswith(TIMING) and name != f"{TIMING}step":
                phase = name.removeprefix(TIMING)
                sums[phase] = sums.get(phase, 0.0) + seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def write_report(report: Json, wall_s: float, folder: Path) -> dict[str, Any]:
    """Write both files; returns the summary."""
    summary = summarize(report, wall_s)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
    (folder / "report.html").write_text(render(summary), encoding="utf-8")
    return summary


def render(summary: Json) -> str:
    """The page: one file, nothing loaded from anywhere."""
    template = files("headway.launcher").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    plots = {
        "reward": plot_reward(summary),
        "staleness": plot_staleness(summary),
        "trainer": plot_bars(summary["trainer_s"], "seconds"),
        "rollout": plot_bars(_rollout_parts(summary["rollout_s"]), "seconds a group"),
    }
    return environment.from_string(template).render(report=summary, plots=plots)


def _rollout_parts(timing: Json) -> dict[str, float]:
    parts = ("pending_s", "generate_s", "reward_s", "other_s", "journal_s")
    return {part.removesuffix("_s"): timing[part] for part in parts}


def plot_reward(summary: Json) -> str:
    """Reward of each step, and the held-out reward where it was evaluated; an SVG as a data URL."""
    figure, axes = _figure()
    rewards = [(one["step"] + 1, one["reward"]) for one in summary["reward"] if one["reward"] is not None]
    axes.plot(*zip(*rewards, strict=True) if rewards else ([], []), label="training reward")
    held_out = [(one["step"], one["reward"]) for one in summary["held_out"]]
    axes.plot(*zip(*held_out, strict=True) if held_out else ([], []), "o-", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend()
    return _data_url(figure)


def plot_staleness(summary: Json) -> str:
    """Tokens by their staleness; those that lost their gradient stand apart. An SVG as a data URL."""
    figure, axes = _figure()
    staleness = summary["staleness"]
    for name, label in (("gradient_tokens", "carried gradient"), ("masked_tokens", "masked")):
        counts = {int(age): number for age, number in staleness[name].items()}
        axes.bar(list(counts), list(counts.values()), label=label)
    axes.axvline(staleness["eta"] + 0.5, linestyle="--", color="black", label=f"bound {staleness['eta']}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("staleness in versions")
    axes.set_ylabel("tokens")
    axes.legend()
    return _data_url(figure)


def plot_bars(values: Mapping[str, float], unit: str) -> str:
    """Horizontal bars, largest on top; an SVG as a data URL."""
    figure, axes = _figure()
    ordered = sorted(values.items(), key=lambda item: item[1])
    axes.barh([name for name, _ in ordered], [value for _, value in ordered])
    axes.set_xlabel(unit)
    return _data_url(figure)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    return figure, figure.subplots()


def _data_url(figure: Any) -> str:
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(image.getvalue()).decode()}"
