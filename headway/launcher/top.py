"""`headway top`: how a run goes, in a terminal, from the controller's `/v1/status`.

    /v1/report once, then /v1/status --learn--> Memory --frame--> what is shown

`frame` is a pure function of a status and of what was remembered from those before it.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.launcher.progress import clock
from headway.launcher.report import HELD_OUT, REWARD, evaluations
from headway.launcher.rest import fetch

Json = Mapping[str, Any]
REFRESH_S = 1.0
NUM_REWARDS = 512
BARS = "▁▂▃▄▅▆▇█"
WIDE = 100
"""Columns from which details are shown."""
MAX_WAITS = 6


@dataclass
class Memory:
    """What a status alone does not tell."""

    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_REWARDS))
    """Step and mean reward, oldest first."""
    held_out: tuple[int, float] | None = None
    """Completed steps of the version that was evaluated last, and its reward."""

    def learn_history(self, report: Json) -> None:
        """Take in a report."""
        for step in report["history"]:
            self._learn_step(step)
        for found in evaluations(report)[-1:]:
            self.held_out = found["step"], found["reward"]

    def learn(self, status: Json) -> None:
        """Take in a status."""
        if status["last_step"] is not None:
            self._learn_step(status["last_step"])
        evaluated = status.get("last_evaluation")
        if evaluated is not None and evaluated["reward"] is not None:
            self.held_out = evaluated["step"], evaluated["reward"]

    def _learn_step(self, step: Json) -> None:
        stats = step["stats"]
        if REWARD in stats and (not self.rewards or step["step"] > self.rewards[-1][0]):
            self.rewards.append((step["step"], stats[REWARD]))
        if HELD_OUT in stats:
            self.held_out = step["step"] + 1, stats[HELD_OUT]


async def top(url: str, console: Console, once: bool = False) -> None:
    """Show how a run goes until it is interrupted; `once`: print one frame.

    Raises:
        Unavailable: Nothing answers at `url`, or no longer.
    """
    memory = Memory()
    status = await fetch(f"{url}/v1/report")
    memory.learn_history(status)
    if once:
        console.print(frame(status, memory, console.width))
        return
    with Live(frame(status, memory, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(REFRESH_S)
            status = await fetch(f"{url}/v1/status")
            memory.learn(status)
            live.update(frame(status, memory, console.width), refresh=True)


def frame(status: Json, memory: Memory, width: int) -> RenderableType:
    """One frame, at most `width` columns wide."""
    parts = [
        _head(status, width),
        _learning(status, memory, width),
        _budget(status),
        _tasks(status),
        _engines(status, width),
        _waits(status),
        _discards(status, width),
    ]
    return Group(*(part for part in parts if part is not None))


def _head(status: Json, width: int) -> RenderableType:
    total, done = status["total_steps"], status["num_steps"]
    words = f"step {done}/{total or '?'}  {status['published_version'] or 'no version'}  up {clock(status['uptime_s'])}"
    head = _grid(Text(status["run"], style="bold", overflow="ellipsis", no_wrap=True), words)
    if status["has_ended"]:
        return Group(head, Text("the run has ended", style="green"))
    return Group(head, ProgressBar(total=total or 1, completed=done if total else 0, width=width))


def _learning(status: Json, memory: Memory, width: int) -> RenderableType:
    stats = status["last_step"]["stats"] if status["last_step"] else {}
    lines = []
    if memory.rewards:
        rewards = [reward for _, reward in memory.rewards]
        lines.append(_line("reward", f"{rewards[-1]:.3f}  {spark(rewards, max(8, width - 30))}"))
    if memory.held_out is not None:
        lines.append(_line("held-out", f"{memory.held_out[1]:.3f} after step {memory.held_out[0]}"))
    if (samples := stats.get("throughput/samples_per_s")) is not None:
        tokens = stats.get("throughput/tokens_per_s", 0.0)
        lines.append(_line("trains", f"{samples:.0f} samples/s  {tokens:.0f} tokens/s  {_waiting(stats)}"))
    return Group(*lines)


def _waiting(stats: Json) -> str:
    """How much of the last step the trainer waited."""
    step = stats.get("timing/step", 0.0)
    return f"waited {stats.get('timing/wait_for_batch', 0.0) / step:.0%}" if step else ""


def _budget(status: Json) -> RenderableType:
    staleness = status["staleness"]
    stats = status["last_step"]["stats"] if status["last_step"] else {}
    age = f"avg {stats.get('rollout/staleness/avg', 0.0):.2f} max {stats.get('rollout/staleness/max', 0.0):.0f}"
    lines = [
        _line("staleness", f"{age} bound {staleness['eta']} ({staleness['policy']})"),
        _line("budget", f"{staleness['outstanding']} of {staleness['limit']} groups outstanding"),
    ]
    if staleness["holds_back"]:
        lines.append(_line("held by", staleness["holds_back"], "yellow"))
    return Group(*lines)


def _tasks(status: Json) -> RenderableType:
    tasks = status["tasks"]
    shown = ("pending", "running", "saving", "ready", "leased", "consumed", "rejected", "quarantined")
    counts = "  ".join(f"{state} {tasks[state]}" for state in shown if tasks[state])
    lines = [_line("tasks", f"{tasks['submitted']}: {counts}" if counts else "none")]
    if not tasks["is_conserved"]:
        lines.append(_line("", "the states do not add up: work was lost or counted twice", "bold red"))
    return Group(*lines)


def _engines(status: Json, width: int) -> RenderableType:
    is_wide = width >= WIDE
    table = _table(("engine", "state", "version", ">req", ">tokens", ">busy", *(["detail"] if is_wide else [])))
    for server in status["servers"]:
        busy = server["busy_s"] / server["joined_s"] if server["joined_s"] else 0.0
        row = (server["name"], _state(server["state"]), server["served_version"] or "-", str(server["num_requests"]))
        detail = [server["detail"]] if is_wide else []
        table.add_row(*row, f"{server['tokens_in_flight']}", f"{busy:.0%}", *detail)
    return table if status["servers"] else _line("engines", "none", "yellow")


def _state(state: str) -> Text:
    return Text(state, style={"serving": "green", "updating": "cyan"}.get(state, "red"))


def _waits(status: Json) -> RenderableType | None:
    waits = sorted(status["waits"], key=lambda wait: -float(wait["since_s"]))
    if not waits:
        return None
    table = _table(("waits for", ">since"))
    for wait in waits[:MAX_WAITS]:
        table.add_row(wait["what"], f"{wait['since_s']:.0f} s")
    if len(waits) > MAX_WAITS:
        table.add_row(f"and {len(waits) - MAX_WAITS} more", "")
    return table


def _discards(status: Json, width: int) -> RenderableType | None:
    if not status["discards"]:
        return None
    is_wide = width >= WIDE
    table = _table(("discarded", ">number", *(["last one"] if is_wide else [])))
    for reason, discard in sorted(status["discards"].items(), key=lambda item: -int(item[1]["count"])):
        example = discard["examples"][-1]["message"] if discard["examples"] else ""
        table.add_row(reason, str(discard["count"]), *([example] if is_wide else []))
    return table


def _table(columns: Iterable[str]) -> Table:
    """Without lines; a name that begins with `>` is a column of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    for column in columns:
        justify: Any = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def _grid(left: RenderableType, right: RenderableType) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    table.add_row(left, right)
    return table


def _line(name: str, text: str, style: str = "") -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=9, style="bold")
    table.add_column(overflow="fold")
    table.add_row(name, Text(text, style=style))
    return table


def spark(values: Iterable[float], width: int) -> str:
    """The last values as bars between the lowest and the highest of them.

    Example:
        >>> spark([0.0, 0.5, 1.0], 8)
        '▁▄█'
    """
    shown = list(values)[-width:]
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale)] for value in shown)
