"""A Chrome trace of the trainer's timeline: the phases of each step, and where it waited. Opens in Perfetto.

The file is an array that is never closed, as the format allows: each event is one line that is only ever appended, so a
trace of a run that died is whole up to its last write, and a recovered run goes on in the same file.
"""

import os
import time
from pathlib import Path
from typing import Any

import orjson

from services.trainer.phases import PhaseEvent, Phases


class PhaseTrace:
    """Writes what a timeline tells; use as its listener.

    Args:
        path: Of the trace.
        save_interval: Steps between two writes.
        rank: Shown as the process.
    """

    def __init__(self, path: Path, save_interval: int, rank: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._save_interval = save_interval
        self._rank = rank
        self._offset_s = time.time() - time.monotonic()
        self._begun: list[PhaseEvent] = []
        self._lines: list[bytes] = []
        self._steps_unsaved = 0
        if not path.exists():
            self._lines.append(b"[")
            self._add(ph="M", name="process_name", args={"name": f"trainer rank {rank}, pid {os.getpid()}"})

    def __call__(self, event: PhaseEvent) -> None:
        if event.kind == "begin":
            self._begun.append(event)
        elif event.kind == "end":
            begin = self._begun.pop()
            self._add(ph="X", name=event.name, ts=self._us(begin), dur=(event.at_s - begin.at_s) * 1e6)
        else:
            self._add(ph="i", name=event.name, ts=self._us(event), s="p")

    def end_of_step(self) -> None:
        """A step has ended: write, if it is time."""
        self._steps_unsaved += 1
        if self._steps_unsaved >= self._save_interval:
            self.flush()

    def flush(self) -> None:
        """Append what is not written yet."""
        with self._path.open("ab") as file:
            file.write(b"".join(self._lines))
        self._lines, self._steps_unsaved = [], 0

    def _us(self, event: PhaseEvent) -> float:
        return (event.at_s + self._offset_s) * 1e6

    def _add(self, **event: Any) -> None:
        self._lines.append(b"\n" + orjson.dumps({"pid": self._rank, "tid": 0, "cat": "trainer", **event}) + b",")


def trace(phases: Phases, path: Path, save_interval: int) -> PhaseTrace:
    """Begin to trace a timeline."""
    made = PhaseTrace(path, save_interval)
    phases.listen(made)
    return made
