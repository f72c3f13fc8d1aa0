"""The leading trainer, as people see and steer it: found by its office in name-resolve, asked over gRPC.

office "leader/trainer" --> candidate --> services/{candidate} --> its address
GetStatus, twice a second --> what it does, and every phase since the last answer --> timeline
Save, StartEvaluation, Stop, when people ask
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc

from headway.errors import HeadwayError, NotFound, Unavailable
from headway.runtime.grpc_client import connect, translating
from headway.runtime.names import Entry
from headway.runtime.wire import version_from_wire
from headway.v1 import trainer_pb2 as pb
from headway.v1.trainer_pb2_grpc import TrainerStub
from services.rollout_controller.status import WaitStatus
from services.rollout_controller.timeline import TRAINER, Timeline
from services.rollout_controller.views import CheckpointStatus, EvaluationStarted, Stopping, TrainerView

OFFICE = "leader/trainer"
ASK_S = 0.5
"""Between two looks at the trainer."""
CALL_S = 5.0
START_S = 30.0
"""For an evaluation to begin: it waits for a version that is being published."""
SAVE_S = 3600.0
SHOWN_S = 10.0
"""An answer older than this is not shown as what the trainer does now."""
log = logging.getLogger(__name__)
Reply = TypeVar("Reply")


class Names(Protocol):
    """The part of name-resolve that knows the office; `NameClient` in production."""

    async def list(self, prefix: str = "") -> list[Entry]: ...

    async def get(self, name: str) -> Entry: ...


@dataclass
class TrainerLink:
    """Speaks with whoever leads.

    Args:
        timeline: Gets the trainer's phases.
        clock: Monotonic seconds.
    """

    names: Names
    timeline: Timeline
    clock: Callable[[], float] = time.monotonic
    _leader: Entry | None = None
    _channel: grpc.aio.Channel | None = None
    _status: pb.TrainerStatus | None = None
    _answered_at: float = 0.0
    _last_phase: int = 0
    """Number of the last phase that is known to have ended."""
    _known_until: float = 0.0
    """Unix seconds; phases that ended earlier were heard of before."""
    _saving: "set[asyncio.Task[Any]]" = field(default_factory=set)

    async def run(self) -> None:
        """Look at the trainer, for ever; one that does not answer, or is not there yet, is looked for again."""
        while True:
            try:
                await self._look()
            except HeadwayError as error:
                log.debug("the trainer does not say what it does: %s", error)
                await self._hang_up()
            await asyncio.sleep(ASK_S)

    async def close(self) -> None:
        """Hang up; a checkpoint that was asked for is written all the same."""
        for task in self._saving:
            task.cancel()
        await asyncio.gather(*self._saving, return_exceptions=True)
        await self._hang_up()

    # ---- what people see

    def view(self) -> TrainerView | None:
        """What it does now; None: nobody leads, or it does not answer."""
        status, age_s = self._status, self.clock() - self._answered_at
        if status is None or self._leader is None or age_s > SHOWN_S:
            return None
        running = next((span for span in reversed(status.phases) if span.is_running), None)
        name = pb.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower()
        return TrainerView(
            name=self._leader.name.rpartition("/")[2],
            phase=running.name if running else name,
            phase_s=running.seconds + age_s if running else status.phase_s + age_s,
            progress=status.phase_progress or None,
            version=version_from_wire(status.version).label if status.HasField("version") else None,
            total_steps=status.total_steps or None,
            waits=[WaitStatus(what=wait.what, since_s=wait.since_s + age_s) for wait in status.waits],
            answered_s=age_s,
        )

    # ---- what people ask for

    async def save(self, wait_s: float) -> CheckpointStatus:
        """Ask for a checkpoint at the end of the running step, and wait so long for it; it is written in any case.

        Raises:
            NotFound: Nobody leads.
            Unavailable: It does not train yet.
        """
        task = asyncio.get_running_loop().create_task(
            self._call("save a checkpoint", lambda stub: stub.Save(pb.SaveRequest(), timeout=SAVE_S))
        )
        self._saving.add(task)
        task.add_done_callback(self._saved)
        await asyncio.wait({task}, timeout=wait_s)
        if not task.done():
            return CheckpointStatus(state="requested", version=None, path=None)
        reply = task.result()
        return CheckpointStatus(state="complete", version=version_from_wire(reply.version).label, path=reply.path)

    async def evaluate(self) -> EvaluationStarted:
        """Begin a held-out evaluation of the published version, beside training.

        Raises:
            NotFound: Nobody leads.
            Unavailable: It does not train yet.
            InvalidInput: The experiment has no held-out tasks.
        """
        request = pb.StartEvaluationRequest()
        reply = await self._call("evaluate", lambda stub: stub.StartEvaluation(request, timeout=START_S))
        return EvaluationStarted(version=version_from_wire(reply.version).label)

    async def stop(self, reason: str) -> Stopping:
        """End training after the running step.

        Raises:
            NotFound: Nobody leads.
            Unavailable: It does not train yet.
        """
        request = pb.StopRequest(reason=reason)
        await self._call("stop", lambda stub: stub.Stop(request, timeout=CALL_S))
        return Stopping(reason=reason)

    def _saved(self, task: "asyncio.Task[Any]") -> None:
        self._saving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a checkpoint that was asked for was not written: %s", error)

    # ---- the connection

    async def _look(self) -> None:
        status = await self._call(
            "look at the trainer",
            lambda stub: stub.GetStatus(pb.GetStatusRequest(after_phase=self._last_phase), timeout=CALL_S),
        )
        self._status, self._answered_at = status, self.clock()
        self._note(status)

    def _note(self, status: pb.TrainerStatus) -> None:
        """Bring the trainer's lane up to date: every phase begins where the one before ends."""
        for span in status.phases:
            ended_at = span.began_at + span.seconds
            if span.is_running or ended_at > self._known_until:
                self.timeline.be(TRAINER, "trainer", span.name, _detail(span, status), at=span.began_at)
            if not span.is_running:
                self.timeline.rest(TRAINER, ended_at)
                self._last_phase, self._known_until = span.number, max(self._known_until, ended_at)

    async def _call(self, what: str, call: Callable[[Any], Awaitable[Reply]]) -> Reply:
        stub = await self._stub()
        try:
            with translating(what):
                return await call(stub)
        except Unavailable:
            await self._hang_up()
            raise

    async def _stub(self) -> Any:
        """The leader's stub.

        Raises:
            NotFound: Nobody leads.
        """
        leader = self._leader
        if self._channel is None or leader is None:
            leader = await self._find()
            await self._hang_up()
            self._leader, self._channel = leader, connect(leader.value)
        return TrainerStub(self._channel)

    async def _find(self) -> Entry:
        candidates = await self.names.list(OFFICE)
        if not candidates:
            raise NotFound("no trainer leads: none has started, or the last one has ended")
        leader = min(candidates, key=lambda entry: entry.create_revision)
        try:
            return await self.names.get(f"services/{leader.value}")
        except NotFound:
            raise Unavailable(f"{leader.value} leads, but is not registered") from None

    async def _hang_up(self) -> None:
        channel, self._channel, self._leader, self._last_phase = self._channel, None, None, 0
        if channel is not None:
            await channel.close()


def _detail(span: pb.TrainerPhaseSpan, status: pb.TrainerStatus) -> str:
    """What a running phase waits for."""
    return status.waits[0].what if span.is_running and status.waits else ""


@asynccontextmanager
async def trainer_link(names: Names, timeline: Timeline) -> AsyncIterator[TrainerLink]:
    """A link that hangs up when the block is left."""
    link = TrainerLink(names, timeline)
    try:
        yield link
    finally:
        await link.close()
