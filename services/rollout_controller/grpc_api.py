"""The controller's gRPC door: messages in, calls to `RolloutController`, messages out. Used by the trainer alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.wire import OUTCOME_TO_WIRE, version_from_wire, version_to_wire
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerServicer
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.rollouts import TaskInput

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]


class ControllerApi(RolloutControllerServicer):
    """See `protos/headway/v1/rollout_controller.proto` for what each call promises."""

    def __init__(self, controller: RolloutController, versions_in_use: Callable[[], Iterable[PolicyVersion]]) -> None:
        self._controller = controller
        self._versions_in_use = versions_in_use

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginReply:
        await self._controller.begin(request.fencing_token, request.step, request.is_fresh)
        return pb.BeginReply()

    async def Submit(self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Context) -> pb.SubmitReply:
        num_new = 0
        async for request in request_iterator:
            num_new += await self._controller.submit(
                [TaskInput(task.task_id, task.data_json) for task in request.tasks]
            )
        return pb.SubmitReply(
            num_new=num_new,
            num_outstanding=self._controller.ledger.num_open,
            incarnation=self._controller.incarnation,
            max_head_offpolicyness=self._controller.settings.eta,
        )

    async def FetchBatch(self, request: pb.FetchBatchRequest, context: Context) -> AsyncIterator[pb.FetchBatchReply]:
        handout = await self._controller.fetch_batch(request.step, request.num_groups, request.fencing_token)
        record = handout.record
        yield pb.FetchBatchReply(
            header=pb.BatchHeader(
                step=record.step,
                num_groups=record.num_groups,
                is_replay=handout.is_replay,
                waited_s=record.waited_s,
                num_masked_tokens=record.num_masked,
                max_head_offpolicyness=record.eta,
            )
        )
        async for groups in self._controller.groups(request.step):
            yield pb.FetchBatchReply(groups=groups)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        version = version_from_wire(request.version)
        await self._controller.commit(request.step, request.fencing_token, version, request.stats)
        return pb.CommitReply(versions_in_use=[version_to_wire(used) for used in self._versions_in_use()])

    async def ForgetBefore(self, request: pb.ForgetBeforeRequest, context: Context) -> pb.ForgetBeforeReply:
        count = await self._controller.forget_before(request.step, request.fencing_token)
        return pb.ForgetBeforeReply(num_groups_forgotten=count)

    async def Evaluate(
        self, request_iterator: AsyncIterator[pb.EvaluateRequest], context: Context
    ) -> AsyncIterator[pb.EvaluateReply]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("header"):
            raise InvalidInput("an evaluation starts with its header")
        version, num_samples = version_from_wire(first.header.version), first.header.num_samples
        ends = self._controller.evaluations.run(version, num_samples, _tasks(request_iterator))
        async for task_id, end in ends:
            yield pb.EvaluateReply(
                task_id=task_id, outcome=OUTCOME_TO_WIRE[end.outcome], message=end.message, group=end.group
            )


async def _tasks(requests: AsyncIterator[pb.EvaluateRequest]) -> AsyncIterator[TaskInput]:
    async for request in requests:
        yield TaskInput(request.task.task_id, request.task.data_json)
