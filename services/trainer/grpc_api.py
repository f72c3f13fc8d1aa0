"""The trainer's gRPC service: status, save, evaluate, stop."""

import logging
from dataclasses import asdict
from typing import Any, Protocol

from headway.core.version import PolicyVersion
from headway.errors import Unavailable
from headway.runtime.waits import Waits
from headway.runtime.wire import version_to_wire
from headway.v1 import trainer_pb2 as pb
from headway.v1.trainer_pb2_grpc import TrainerServicer
from services.trainer.loop import TrainLoop
from services.trainer.phase_log import PhaseLog
from services.trainer.phases import Phase, Phases
from services.trainer.statistics import StatsLogger

SERVICE = "headway.v1.Trainer"
TO_WIRE = {
    Phase.STARTING: pb.TRAINER_PHASE_STARTING,
    Phase.STANDBY: pb.TRAINER_PHASE_STANDBY,
    Phase.WARM_START: pb.TRAINER_PHASE_WARM_START,
    Phase.WAIT_FOR_BATCH: pb.TRAINER_PHASE_WAITING,
    Phase.WRITE: pb.TRAINER_PHASE_PUBLISHING,
    Phase.PUBLISH: pb.TRAINER_PHASE_PUBLISHING,
    Phase.EVALUATE: pb.TRAINER_PHASE_EVALUATING,
    Phase.CHECKPOINT: pb.TRAINER_PHASE_SAVING,
    Phase.SAVE: pb.TRAINER_PHASE_SAVING,
    Phase.FINISHED: pb.TRAINER_PHASE_FINISHED,
}
"""Every other phase is a part of training."""
log = logging.getLogger(__name__)


class TrainerView(Protocol):
    """What the service shows and steers; the loop is there once this trainer leads."""

    phases: Phases
    phase_log: PhaseLog
    waits: Waits
    loop: TrainLoop | None
    statistics: StatsLogger | None


class TrainerApi(TrainerServicer):
    """Speaks for the trainer of this process."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.TrainerStatus:
        phases, loop = self._view.phases, self._view.loop
        status = pb.TrainerStatus(
            phase=TO_WIRE.get(phases.current, pb.TRAINER_PHASE_TRAINING),
            phase_s=phases.seconds_in_phase(),
            phase_progress=phases.progress,
            stats=self._view.statistics.last if self._view.statistics else {},
            waits=[pb.TrainerWait(what=wait.what, since_s=wait.since_s) for wait in self._view.waits.snapshot()],
            phases=[pb.TrainerPhaseSpan(**asdict(span)) for span in self._view.phase_log.after(request.after_phase)],
        )
        if loop is not None:
            status.version.CopyFrom(version_to_wire(loop.progress.version))
            status.total_steps = loop.total_steps
            if loop.evaluating is not None:
                status.evaluating.CopyFrom(version_to_wire(loop.evaluating))
        return status

    async def Save(self, request: pb.SaveRequest, context: Any) -> pb.SaveReply:
        path = await self._leading().save()
        return pb.SaveReply(version=version_to_wire(PolicyVersion.parse(path.name)), path=str(path))

    async def StartEvaluation(self, request: pb.StartEvaluationRequest, context: Any) -> pb.StartEvaluationReply:
        return pb.StartEvaluationReply(version=version_to_wire(await self._leading().evaluate()))

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.StopReply:
        reason = request.reason or "asked to"
        log.info("asked to stop: %s", reason)
        self._leading().stop(reason)
        return pb.StopReply()

    def _leading(self) -> TrainLoop:
        if self._view.loop is None:
            raise Unavailable(f"this trainer does not train yet: it is {self._view.phases.current}")
        return self._view.loop
