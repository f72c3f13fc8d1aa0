"""What engines, the trainer, evaluations and this process's waits did lately: lanes of spans, bounded.

    fleet, waits, evaluations --sampled--> lanes --view--> /v1/timeline
    trainer ---------phases, as it tells--->

Engines are looked at whenever one changes its state, and every `SAMPLE_S` for whether they are busy. Waits shorter than
that are not seen. A lane keeps its last `MAX_SPANS` spans; of many lanes, those that have moved last.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headway.runtime.waits import Wait
from services.rollout_controller.evaluations import EvaluationRecord
from services.rollout_controller.fleet_member import EngineState
from services.rollout_controller.fleet_status import EngineStatus
from services.rollout_controller.views import Lane, LaneKind, Span, TimelineView

SAMPLE_S = 0.25
MAX_SPANS = 2048
MAX_LANES = 256
WAITS, EVALUATIONS, TRAINER = "controller", "evaluation", "trainer"
ORDER: tuple[LaneKind, ...] = ("engine", "trainer", "evaluation", "wait")
LOST = (EngineState.SILENT, EngineState.FAILED)


@dataclass(slots=True)
class Stretch:
    """A lane was in one state for a while; no end: it still is."""

    state: str
    detail: str
    begin: float
    end: float | None = None


@dataclass(slots=True)
class LaneRecord:
    """One lane."""

    kind: LaneKind
    stretches: deque[Stretch] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))

    @property
    def last(self) -> Stretch | None:
        return self.stretches[-1] if self.stretches else None

    @property
    def moved_at(self) -> float:
        return 0.0 if self.last is None else self.last.end or self.last.begin


class Timeline:
    """The lanes. Times are Unix seconds.

    Example:
        >>> timeline = Timeline()
        >>> for at, state in enumerate(["idle", "busy", "busy", "idle"]):
        ...     timeline.be("engine/0", "engine", state, "", at=float(at))
        >>> [(span.state, span.begin, span.end) for span in timeline.view(now=4.0, since=1.5).lanes[0].spans]
        [('busy', 1.0, 3.0), ('idle', 3.0, None)]
    """

    def __init__(self) -> None:
        self._lanes: dict[str, LaneRecord] = {}

    def be(self, name: str, kind: LaneKind, state: str, detail: str, at: float) -> None:
        """The lane is in this state from `at` on, and in no other."""
        lane = self._lane(name, kind)
        last = lane.last
        if last is not None and last.end is None:
            if last.begin == at:  # heard of again, with more known
                last.state, last.detail = state, detail or last.detail
            if (last.state, last.detail) == (state, detail) or last.begin == at:
                return
            last.end = at
        lane.stretches.append(Stretch(state, detail, at))

    def rest(self, name: str, at: float) -> None:
        """The lane is in no state any more."""
        last = self._lanes[name].last if name in self._lanes else None
        if last is not None and last.end is None:
            last.end = at

    def add(self, name: str, kind: LaneKind, stretch: Stretch) -> None:
        """Something began; it may overlap with others. Its end is set by whoever knows of it."""
        self._lane(name, kind).stretches.append(stretch)

    def of_kind(self, kind: LaneKind) -> Iterable[str]:
        return [name for name, lane in self._lanes.items() if lane.kind == kind]

    def view(self, now: float, since: float) -> TimelineView:
        """The spans that had not ended at `since`."""
        lanes = sorted(self._lanes.items(), key=lambda item: (ORDER.index(item[1].kind), item[0]))
        return TimelineView(
            now=now, lanes=[Lane(name=name, kind=lane.kind, spans=_spans(lane, since)) for name, lane in lanes]
        )

    def _lane(self, name: str, kind: LaneKind) -> LaneRecord:
        if name not in self._lanes:
            if len(self._lanes) >= MAX_LANES:
                del self._lanes[min(self._lanes, key=lambda known: self._lanes[known].moved_at)]
            self._lanes[name] = LaneRecord(kind)
        return self._lanes[name]


def _spans(lane: LaneRecord, since: float) -> list[Span]:
    shown = (stretch for stretch in lane.stretches if stretch.end is None or stretch.end > since)
    return [Span(state=one.state, detail=one.detail, begin=one.begin, end=one.end) for one in shown]


class Recorder:
    """Writes into a timeline what this process can see.

    Args:
        engines: The fleet now.
        evaluations: Those that run now.
        waits: What is waited for now.
        clock: Unix seconds.
    """

    def __init__(
        self,
        timeline: Timeline,
        engines: Callable[[], Iterable[EngineStatus]],
        evaluations: Callable[[], Iterable[EvaluationRecord]],
        waits: Callable[[], Iterable[Wait]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeline = timeline
        self._engines, self._evaluations, self._waits = engines, evaluations, waits
        self._clock = clock
        self._open: dict[tuple[str, str], Stretch] = {}
        """Waits and evaluations that go on, by lane and name."""

    async def run(self) -> None:
        """Look every `SAMPLE_S`, for ever."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)

    def look(self) -> None:
        """Note what goes on now."""
        now = self._clock()
        self.look_at_engines()
        self._follow(EVALUATIONS, "evaluation", "running", self._running_evaluations(), now)
        begun = {wait.what: now - wait.since_s for wait in reversed(list(self._waits()))}
        self._follow(WAITS, "wait", "waiting", begun, now)

    def look_at_engines(self) -> None:
        """Note what the engines do now; called whenever one changes its state."""
        now, seen = self._clock(), set()
        for engine in self._engines():
            seen.add(name := f"engine/{engine.name}")
            self._timeline.be(name, "engine", *state_of(engine), at=now)
        for name in self._timeline.of_kind("engine"):
            if name not in seen:
                self._timeline.rest(name, now)

    def _running_evaluations(self) -> dict[str, float]:
        return {record.version.label: record.began_at for record in self._evaluations()}

    def _follow(self, lane: str, kind: LaneKind, state: str, begun: dict[str, float], now: float) -> None:
        """Open a span for each name that is new, and close those of names that are gone."""
        for key in [key for key in self._open if key[0] == lane and key[1] not in begun]:
            self._open.pop(key).end = now
        for detail, begin in begun.items():
            if (lane, detail) not in self._open:
                self._open[lane, detail] = stretch = Stretch(state, detail, begin)
                self._timeline.add(lane, kind, stretch)


def state_of(engine: EngineStatus) -> tuple[str, str]:
    """What an engine's lane shows: its state, and a detail."""
    match engine.state:
        case EngineState.SERVING:
            return ("busy" if engine.requests_running else "idle"), engine.version or ""
        case state if state in LOST:
            return "lost", engine.last_error
        case state:
            return state.value, ""
