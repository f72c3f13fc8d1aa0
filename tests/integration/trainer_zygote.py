"""A process that has everything imported, and forks trainers: each starts in milliseconds, and can be killed for real.

stdin:  one JSON object a line: {"config", "name_resolve", "instance", "at", "occurrence", "signal", "lease_s"}
stdout: {"pid"} when a trainer was forked, {"pid", "status"} when it has ended

`at` names an event of the trainer's timeline, "end publish" or "mark checkpoint named"; the trainer sends itself
`signal` when that has happened `occurrence` times. Empty: it runs to its end.
"""

import asyncio
import json
import os
import selectors
import signal
import sys
from pathlib import Path
from typing import Any

from headway.config import load_experiment
from headway.errors import HeadwayError
from headway.runtime.logs import configure_logging
from headway.runtime.service import Placement
from services.trainer import app, leadership
from services.trainer.phases import PhaseEvent, Phases

POLL_S = 0.02


def main() -> None:
    running: set[int] = set()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        if selector.select(POLL_S):
            line = sys.stdin.readline()
            if not line:
                break
            running.add(fork(json.loads(line)))
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                say(pid=pid, status=os.waitstatus_to_exitcode(status))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(run(order))
    say(pid=pid)
    return pid


def run(order: dict[str, Any]) -> int:
    configure_logging("trainer", order["instance"])
    phases = Phases()
    phases.listen(Hit(order["at"], order["occurrence"], order["signal"]))
    leadership.LEASE_S = order["lease_s"]
    placement = Placement(name_resolve=order["name_resolve"], instance=order["instance"])
    try:
        asyncio.run(train(Path(order["config"]), placement, phases))
    except HeadwayError as error:
        print(f"trainer/{order['instance']}: {error}", file=sys.stderr)
        return 2
    except BaseException as error:  # noqa: BLE001 - the end of a process
        print(f"trainer/{order['instance']}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def train(config: Path, placement: Placement, phases: Phases) -> None:
    async with app.serve(load_experiment(config), placement, phases) as running:
        await running.supervisor.wait()


class Hit:
    """Hits this process at a point of its timeline."""

    def __init__(self, point: str, occurrence: int, number: int) -> None:
        self._point = point
        self._left = occurrence
        self._signal = number

    def __call__(self, event: PhaseEvent) -> None:
        if f"{event.kind} {event.name}" == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._signal)


def say(**content: int) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
