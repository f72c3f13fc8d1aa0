"""Make docs/metrics.md and the Grafana dashboard again from the table of metrics: `observability.py [--check]`.

The dashboard begins with what a person looks at first; below it, a row for each service has a panel for each of its
metrics: gauges as they are, counters as rates, histograms as quantiles.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.runtime.metrics_table import COMMON, ENGINE, SERVICES, TABLE, Kind, MetricSpec, metrics_of

ROOT = Path(__file__).resolve().parent.parent
METRICS = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "docker" / "observability" / "grafana" / "dashboards" / "headway.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
UNITS = {"seconds": "s", "bytes": "bytes"}
WIDTH, COLUMNS = 24, 3
EACH = "on (instance) group_left"
INTRODUCTION = """# Metrics

Every service shows its metrics for Prometheus at `/metrics` of its HTTP port: 8470 in containers, else what
`headway up` prints. An inference service has two doors: its agent's, at `--metrics-port` (8470 in containers), and its
engine's, at the engine's port (8000), with the engine's own names. How alerts are answered stands in
[operations](operations.md#alerts).

Made by `tools/observability.py` from [metrics_table.py](../headway/runtime/metrics_table.py)."""


@dataclass(frozen=True)
class Panel:
    """A panel: a number (`stat`) or a curve (`timeseries`)."""

    title: str
    targets: Sequence[tuple[str, str]]
    """Expression and legend."""
    unit: str = "short"
    description: str = ""
    kind: str = "timeseries"


FIRST = (
    Panel("Version served by the whole fleet", [("headway_served_step", "step")], kind="stat"),
    Panel(
        "Tasks not accounted for",
        [("headway_tasks_submitted - on (instance) sum by (instance) (headway_tasks)", "lost")],
        description="0, or work was lost or counted twice.",
        kind="stat",
    ),
    Panel("Tasks given up", [('headway_tasks{state="quarantined"}', "quarantined")], kind="stat"),
    Panel(
        "Oldest wait",
        [('headway_oldest_wait_seconds{job="headway-controller"}', "wait")],
        "s",
        "What is waited for: /v1/status.",
        "stat",
    ),
    Panel(
        "Reward",
        [("headway_trainer_reward", "training"), ("headway_trainer_held_out_reward", "held-out")],
        description="Mean over the samples of a step, and of the last evaluation.",
    ),
    Panel(
        "Staleness budget",
        [("headway_staleness_outstanding", "outstanding"), ("headway_staleness_limit", "limit")],
        description="Groups started and not trained on. At the limit all the time: the trainer is the slower half.",
    ),
    Panel(
        "Staleness of what is trained on",
        [
            ("sum by (staleness) (rate(headway_trained_tokens_total[5m]))", "{{staleness}}"),
            ("sum(rate(headway_masked_tokens_total[5m]))", "masked"),
        ],
        description="Tokens a second by how many versions old they are.",
    ),
    Panel(
        "Where the trainer's time goes",
        [("rate(headway_trainer_phase_seconds_total[5m])", "{{phase}}")],
        "percentunit",
        "Waiting for batches: generation is the slower half.",
    ),
    Panel(
        "Where a group's time goes",
        [(f"rate(headway_rollout_seconds_total[5m]) / {EACH} rate(headway_groups_total[5m])", "{{phase}}")],
        "s",
        "Seconds a group.",
    ),
    Panel(
        "How busy each engine is",
        [("rate(headway_server_busy_seconds_total[5m])", "{{server}}")],
        "percentunit",
        "Part of the time in which it has a request.",
    ),
    Panel(
        "Versions behind",
        [("headway_published_step - on (instance) group_right headway_server_step", "{{server}}")],
        description="The newest published version, less the one that each engine serves.",
    ),
    Panel(
        "Discards",
        [("sum by (reason) (rate(headway_discards_total[5m])) > 0", "{{reason}}")],
        description="Attempts a second that do not end in a consumed group, by reason.",
    ),
    Panel("Tasks by state", [('headway_tasks{state!="consumed"}', "{{state}}")]),
    Panel("Tokens generated a second", [("rate(sglang:generation_tokens_total[1m])", "{{instance}}")]),
    Panel("Services that answer", [("sum by (job) (up)", "{{job}}")]),
    Panel(
        "Reward latency",
        [
            (f"histogram_quantile({q}, sum by (le) (rate(headway_reward_seconds_bucket[5m])))", f"p{round(q * 100)}")
            for q in (0.5, 0.99)
        ],
        "s",
    ),
    Panel(
        "Policies apart",
        [("headway_trainer_divergence", "{{of}}")],
        description="Proximal from behaviour at staleness 0 is the mismatch between engine and trainer.",
    ),
    Panel(
        "Health of the update",
        [
            ("headway_trainer_effective_sample_size", "effective sample size"),
            ("headway_trainer_entropy", "entropy"),
            ("headway_trainer_clip_ratio", "clipped"),
        ],
    ),
)


def panel_of(spec: MetricSpec) -> Panel:
    """The panel of one metric."""
    title = spec.name.removeprefix("headway_").removeprefix("sglang:").removesuffix("_total").replace("_", " ")
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *spec.labels))
    if spec.kind is Kind.HISTOGRAM:
        by = ", ".join(("le", *spec.labels))
        quantile = f"histogram_quantile(0.99, sum by ({by}) (rate({spec.name}_bucket[5m])))"
        return Panel(f"{title}, p99", [(quantile, legend)], UNITS.get(spec.unit, "short"), spec.help)
    if spec.kind is Kind.COUNTER:
        unit = "percentunit" if spec.unit == "seconds" else "short"
        return Panel(f"{title} a second", [(f"rate({spec.name}[5m])", legend)], unit, spec.help)
    return Panel(title, [(spec.name, legend)], UNITS.get(spec.unit, "short"), spec.help)


def rows() -> Iterator[tuple[str, list[Panel], bool]]:
    """Title, panels, and whether the row is folded."""
    yield "Run", list(FIRST), False
    common = {spec.name for spec in COMMON}
    for service in (*SERVICES, ENGINE):
        specs = [spec for spec in metrics_of(service) if spec.kind is not Kind.INFO and spec.name not in common]
        yield service, [panel_of(spec) for spec in specs], True
    yield "every service", [panel_of(spec) for spec in COMMON if spec.kind is not Kind.INFO], True


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = number = 0
    for title, members, is_folded in rows():
        number += 1
        row: dict[str, Any] = {"id": number, "title": title, "type": "row", "collapsed": is_folded, "panels": []}
        row["gridPos"] = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        placed, y = placed_panels(members, y + 1, number + 1)
        number += len(placed)
        panels.append(row)
        (row["panels"] if is_folded else panels).extend(placed)
    return {
        "uid": "headway",
        "title": "Headway",
        "tags": ["headway"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def placed_panels(panels: Sequence[Panel], y: int, first_id: int) -> tuple[list[dict[str, Any]], int]:
    """Panels from a line on, numbers four in a line and curves three; and the line behind them."""
    placed, x, height = [], 0, 0
    for number, panel in enumerate(panels):
        width, tall = (WIDTH // 4, 4) if panel.kind == "stat" else (WIDTH // COLUMNS, 8)
        if x + width > WIDTH or (height and tall != height):
            x, y = 0, y + height
        height = tall
        placed.append(as_grafana(panel, first_id + number, {"x": x, "y": y, "w": width, "h": tall}))
        x += width
    return placed, y + height


def as_grafana(panel: Panel, number: int, where: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(panel.targets)
    ]
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind,
        "gridPos": where,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
        "targets": targets,
    }


def document() -> str:
    """docs/metrics.md."""
    lines = [INTRODUCTION]
    common = {spec.name for spec in COMMON}
    for title, specs in (("every service", COMMON), *((name, metrics_of(name)) for name in (*SERVICES, ENGINE))):
        own = [spec for spec in specs if title == "every service" or spec.name not in common]
        lines += ["", f"## {title}", "", "| metric | type | unit | labels | what |", "|---|---|---|---|---|"]
        lines += [row_of(spec) for spec in own]
    return "\n".join(lines) + "\n"


def row_of(spec: MetricSpec) -> str:
    """A line of the table; an info's and a count's unit is left out."""
    values = f" ({', '.join(spec.values)})" if spec.values else ""
    labels = ", ".join(f"`{label}`" for label in spec.labels) + values
    unit = "" if spec.unit == "1" else spec.unit
    return f"| `{spec.name}` | {spec.kind} | {unit} | {labels} | {spec.help} |"


def main(arguments: Sequence[str]) -> int:
    """Write both files, or with --check tell which of them is stale."""
    made = {METRICS: document(), DASHBOARD: json.dumps(dashboard(), indent=1) + "\n"}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what {len(TABLE)} metrics make: run tools/observability.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
