"""Over real gRPC and a real journal: tasks go in, batches come out in order, once, and again when asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest

from headway.core.selection import StalenessPolicy
from headway.core.version import PolicyVersion
from headway.runtime.grpc_client import connect
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import group_from_wire, version_to_wire
from headway.testing.model_fleet import ModelFleet, ModelWorkflow, version_of
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerStub, add_RolloutControllerServicer_to_server
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.grpc_api import ControllerApi
from services.rollout_controller.journal import Journal
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner

SERVICE = "headway.v1.RolloutController"


async def no_wait(data: dict[str, Any]) -> float:
    return float(data["answer"])


@asynccontextmanager
async def serving(folder: Path, fleet: ModelFleet, eta: int = 1, batch: int = 4) -> AsyncIterator[Any]:
    """A controller behind gRPC; yields its stub and itself."""
    settings = Settings(batch, eta, max_concurrent=16, queue_size=64, policy=StalenessPolicy.MASK)
    runner = GroupRunner(ModelWorkflow(no_wait), fleet, num_samples=2)
    async with Journal(folder / "journal.sqlite") as journal, Supervisor() as supervisor:
        controller = RolloutController(settings, journal, fleet, runner, lambda version: runner, supervisor, Waits())
        await controller.start()
        api = ControllerApi(controller, lambda: [PolicyVersion(1, fleet.published)])
        add = lambda server: add_RolloutControllerServicer_to_server(api, server)  # noqa: E731
        async with serve_grpc("127.0.0.1", 0, add, [SERVICE]) as server, connect(f"127.0.0.1:{server.port}") as channel:
            yield RolloutControllerStub(channel), controller
        await controller.close()


def make_fleet() -> ModelFleet:
    return ModelFleet(2, tokens_per_s=2000, length_of=lambda request: 5, load_s=0.001)


def tasks(first: int, count: int) -> list[types_pb2.Task]:
    rows = range(first, first + count)
    return [types_pb2.Task(task_id=f"0/{row}", data_json=orjson.dumps({"row": row, "answer": row})) for row in rows]


async def submit(stub: Any, wanted: list[types_pb2.Task]) -> pb.SubmitReply:
    async def requests() -> AsyncIterator[pb.SubmitRequest]:
        yield pb.SubmitRequest(tasks=wanted)

    return await stub.Submit(requests(), timeout=10)


async def fetch(stub: Any, step: int, token: int = 1) -> tuple[pb.BatchHeader, list[types_pb2.Group]]:
    request = pb.FetchBatchRequest(step=step, num_groups=4, fencing_token=token)
    parts = [part async for part in stub.FetchBatch(request, timeout=10)]
    return parts[0].header, [types_pb2.Group.FromString(group) for part in parts for group in part.groups]


async def until_waiting(controller: RolloutController, what: str) -> None:
    async with asyncio.timeout(10):
        while not any(what in wait.what for wait in controller.waits.snapshot()):  # noqa: ASYNC110 - a call from outside
            await asyncio.sleep(0)


async def commit(stub: Any, step: int, token: int = 1) -> pb.CommitReply:
    version = version_to_wire(PolicyVersion(1, step + 1))
    return await stub.Commit(pb.CommitRequest(step=step, fencing_token=token, version=version, stats={"reward": 0.5}))


async def test_the_whole_loop_hands_out_every_task_once_and_in_time(tmp_path: Path) -> None:
    fleet = make_fleet()
    async with serving(tmp_path, fleet) as (stub, controller):
        await stub.Begin(pb.BeginRequest(fencing_token=1, step=0, is_fresh=True))
        assert (await submit(stub, tasks(0, 20))).num_new == 20
        assert (await submit(stub, tasks(0, 20))).num_new == 0
        fleet.publish(0)
        seen: list[str] = []
        for step in range(5):
            header, groups = await fetch(stub, step)
            assert header.num_groups == len(groups) == 4
            for group in map(group_from_wire, groups):
                assert len(group.trajectories) == 2
                seen.append(group.task_id)
                for trajectory in group.trajectories:
                    ages = step - trajectory.versions[trajectory.loss_mask]
                    assert ages.max() <= 1
                    assert trajectory.versions[1:].tolist() == [version_of(int(i)) for i in trajectory.input_ids[1:]]
            fleet.publish(step + 1)
            await commit(stub, step)
        assert sorted(seen) == sorted(task.task_id for task in tasks(0, 20))
        controller.ledger.check()


async def test_a_batch_comes_again_as_it_was_also_after_a_restart(tmp_path: Path) -> None:
    fleet = make_fleet()
    async with serving(tmp_path, fleet) as (stub, _):
        await submit(stub, tasks(0, 12))
        fleet.publish(0)
        _, first = await fetch(stub, 0)
        header, again = await fetch(stub, 0)
        assert header.is_replay
        assert again == first
    async with serving(tmp_path, make_fleet()) as (stub, controller):
        header, again = await fetch(stub, 0)
        assert header.is_replay
        assert again == first
        assert (await submit(stub, tasks(0, 12))).num_new <= 12 - 4
        controller.ledger.check()


async def test_an_older_leader_is_refused_even_while_it_waits(tmp_path: Path) -> None:
    async with serving(tmp_path, make_fleet()) as (stub, controller):
        waiting = asyncio.ensure_future(fetch(stub, 0, token=1))
        await until_waiting(controller, "step 0")
        await stub.Begin(pb.BeginRequest(fencing_token=2, step=0))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await waiting
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    async with serving(tmp_path, make_fleet()) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Begin(pb.BeginRequest(fencing_token=1, step=0))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_evaluation_streams_every_row_with_one_version(tmp_path: Path) -> None:
    fleet = make_fleet()
    async with serving(tmp_path, fleet) as (stub, controller):
        fleet.publish(3)

        async def requests() -> AsyncIterator[pb.EvaluateRequest]:
            yield pb.EvaluateRequest(
                header=pb.EvaluateHeader(version=version_to_wire(PolicyVersion(1, 3)), num_samples=3)
            )
            for task in tasks(0, 30):
                yield pb.EvaluateRequest(task=task)

        replies = [reply async for reply in stub.Evaluate(requests(), timeout=10)]
        assert sorted(reply.task_id for reply in replies) == sorted(task.task_id for task in tasks(0, 30))
        assert {reply.outcome for reply in replies} == {types_pb2.OUTCOME_ACCEPTED}
        assert all(len(reply.group.trajectories) == 3 for reply in replies)
        assert controller.ledger.num_submitted == 0
