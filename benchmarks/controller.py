"""What the rollout controller costs, and what its policies give.

    python -m benchmarks.controller [tasks] [groups] [memory] [goodput]

tasks    No-op rollouts through `BatchTaskDispatcher`, per second.
groups   Submit, roll out, journal (fsynced) and FetchBatch over gRPC, with an engine that answers at once: groups and
MB per second,
         against a bare grpc.aio stream of the same bytes in the same process; and CPU time per group, client included.
memory   Resident memory after 1,000 and after 100,000 rollouts.
goodput  In virtual time: steps per second as a fraction of the limit min(slots / mean length, batch / train time),
tokens that
         lost their gradient, and the greatest staleness that was trained on. Log-normal lengths.
"""

import asyncio
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import orjson
import uvloop

from headway.core.version import PolicyVersion
from headway.runtime.grpc_client import connect
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import version_to_wire
from headway.testing.scenario import Scenario
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import (
    RolloutControllerStub,
    add_RolloutControllerServicer_to_server,
)
from headway.workflow.api import InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from headway.workflow.sequence import TokenSequence
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.dispatcher import BatchTaskDispatcher, Slots
from services.rollout_controller.grpc_api import ControllerApi
from services.rollout_controller.journal import Journal
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, TaskInput
from services.rollout_controller.simulated import simulate

BATCH = 32
PROMPT = [1] * 16
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Named:
    """A task of nothing."""

    task_id: str


class InstantFleet:
    """Servers that have every version and every answer at once."""

    def __init__(self, num_tokens: int) -> None:
        self.served_step: int | None = None
        self._num_tokens = num_tokens
        self._changed = asyncio.Event()

    def publish(self, step: int) -> None:
        self.served_step = step
        self._changed.set()

    async def wait_for_step(self, step: int) -> None:
        while self.served_step is None or self.served_step < step:
            self._changed.clear()
            await self._changed.wait()

    def get_version(self) -> int:
        return self.served_step or 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        count = self._num_tokens
        return ModelResponse(req.input_ids, [5] * count, [-1.0] * count, [self.get_version()] * count)


class OneTurn(RolloutWorkflow):
    """One generation, a constant reward."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest(input_ids=list(PROMPT)))
        sequence = TokenSequence()
        sequence.add_prompt(list(PROMPT))
        sequence.add_response(response)
        return sequence.trajectory(1.0)


class Bare(ControllerApi):
    """The limit: the same messages, with nothing behind them."""

    def __init__(self, controller: RolloutController, replies: list[pb.FetchBatchReply]) -> None:
        super().__init__(controller, list)
        self._replies = replies

    async def Submit(self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Any) -> pb.SubmitReply:
        async for _ in request_iterator:
            pass
        return pb.SubmitReply()

    async def FetchBatch(self, request: pb.FetchBatchRequest, context: Any) -> AsyncIterator[pb.FetchBatchReply]:
        for reply in self._replies:
            yield reply


@asynccontextmanager
async def running(fleet: InstantFleet, num_samples: int) -> AsyncIterator[RolloutController]:
    """A controller on a journal in a temporary folder."""
    settings = Settings(BATCH, eta=2, max_concurrent=2 * BATCH, queue_size=32 * BATCH)
    runner = GroupRunner(OneTurn(), fleet, num_samples)
    with tempfile.TemporaryDirectory() as folder:
        async with Journal(Path(folder) / "journal.sqlite") as journal, Supervisor() as supervisor:
            made = RolloutController(settings, journal, fleet, runner, lambda _: runner, supervisor, Waits())
            await made.start()
            await made.begin(1, 0, is_fresh=True)
            yield made
            await made.close()


@asynccontextmanager
async def serving(servicer: ControllerApi) -> AsyncIterator[Any]:
    """Its stub."""

    def add(server: grpc.aio.Server) -> None:
        add_RolloutControllerServicer_to_server(servicer, server)

    async with serve_grpc("127.0.0.1", 0, add, []) as server, connect(f"127.0.0.1:{server.port}") as channel:
        yield RolloutControllerStub(channel)


async def submit(stub: Any, first: int, count: int) -> None:
    row = orjson.dumps({"prompt": "sort 12345678=", "answer": "12345678"})
    tasks = [types_pb2.Task(task_id=f"0/{first + number}", data_json=row) for number in range(count)]

    async def requests() -> AsyncIterator[pb.SubmitRequest]:
        yield pb.SubmitRequest(tasks=tasks)

    await stub.Submit(requests())


async def fetch(stub: Any, step: int) -> list[pb.FetchBatchReply]:
    request = pb.FetchBatchRequest(step=step, num_groups=BATCH, fencing_token=1)
    return [part async for part in stub.FetchBatch(request)]


async def tasks(count: int = 100_000) -> None:
    async def nothing() -> int:
        return 1

    rates = []
    for _ in range(ROUNDS):
        dispatcher: BatchTaskDispatcher[Named, int] = BatchTaskDispatcher(4096, lambda _: nothing, Slots(256))
        named = [Named(str(number)) for number in range(count)]
        began, taken = time.perf_counter(), 0
        for one in named:
            dispatcher.submit_task_input(one)
        while taken < count:
            taken += len(await dispatcher.wait_any(1024))
        rates.append(count / (time.perf_counter() - began))
    print(f"tasks: {statistics.median(rates):,.0f} no-op rollouts a second")


async def groups() -> None:
    print(f"{'samples':>8} {'tokens':>7} {'groups/s':>9} {'MB/s':>7} {'CPU ms/group':>13} {'bare groups/s':>14}")
    for num_samples, num_tokens, num_steps in ((16, 12, 30), (8, 256, 20), (4, 1024, 20)):
        rounds = [await _groups(num_samples, num_tokens, num_steps) for _ in range(ROUNDS)]
        rate, cpu_ms, bare, group_bytes = (statistics.median(column) for column in zip(*rounds, strict=True))
        row = f"{num_samples:>8} {num_tokens:>7} {rate:>9.0f} {rate * group_bytes / 1e6:>7.1f} {cpu_ms:>13.2f}"
        print(f"{row} {bare:>14.0f}")


async def _groups(num_samples: int, num_tokens: int, num_steps: int) -> tuple[float, float, float, float]:
    """Groups a second, CPU milliseconds a group, groups a second of the bare stream, bytes of a group."""
    fleet = InstantFleet(num_tokens)
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(running(fleet, num_samples))
        stub = await stack.enter_async_context(serving(ControllerApi(made, list)))
        await submit(stub, 0, 4 * BATCH)
        fleet.publish(0)
        began, cpu = time.perf_counter(), _cpu_s()
        for step in range(num_steps):
            await submit(stub, (step + 4) * BATCH, BATCH)
            replies = await fetch(stub, step)
            fleet.publish(step + 1)
            version = version_to_wire(PolicyVersion(1, step + 1))
            await stub.Commit(pb.CommitRequest(step=step, fencing_token=1, version=version))
        rate, spent = num_steps * BATCH / (time.perf_counter() - began), _cpu_s() - cpu
        bare = await stack.enter_async_context(serving(Bare(made, replies)))
        began = time.perf_counter()
        for step in range(num_steps):
            await submit(bare, step * BATCH, BATCH)
            await fetch(bare, step)
        limit = num_steps * BATCH / (time.perf_counter() - began)
    return rate, spent * 1e3 / (num_steps * BATCH), limit, sum(reply.ByteSize() for reply in replies) / BATCH


async def memory() -> None:
    fleet = InstantFleet(num_tokens=4)
    async with running(fleet, num_samples=1) as made:
        fleet.publish(0)
        row = 0
        for step in range(100_000 // BATCH + 1):
            wanted = 4 * BATCH - made.ledger.num_open
            await made.submit([TaskInput(f"0/{row + number}", b"{}") for number in range(wanted)])
            row += wanted
            await made.fetch_batch(step, BATCH, 1)
            fleet.publish(step + 1)
            await made.commit(
                step, 1, PolicyVersion(1, step + 1), {f"statistic/{number}": 0.5 for number in range(160)}
            )
            await made.forget_before(step - 2, 1)
            if step in (1000 // BATCH, 100_000 // BATCH):
                print(f"memory: {_resident_mb():.1f} MB after {step * BATCH:,} rollouts")


async def goodput() -> None:
    etas = (1, 2, 3, 4, 6, 8)
    print("fraction of the limit / tokens without gradient / greatest staleness, by eta " + " ".join(map(str, etas)))
    for policy in ("mask", "wait"):
        for slots_per_group in (1, 2):
            for sigma in (0.5, 0.8, 1.2):
                cells = [await asyncio.to_thread(_goodput, policy, slots_per_group, sigma, eta) for eta in etas]
                print(f"{policy:5} S/B {slots_per_group} sigma {sigma}: " + "  ".join(cells))


def _goodput(policy: str, slots_per_group: int, sigma: float, eta: int) -> str:
    slots, train_s = slots_per_group * 16, 1.0 / slots_per_group
    findings = simulate(
        Scenario(
            seed=1, policy=policy, batch_size=16, eta=eta, num_samples=1, max_concurrent=slots, num_steps=80,
            mean_tokens=100, tokens_per_s=100, max_tokens=3000, sigma=sigma, train_s=train_s, load_s=0,
            journal_s=0, reward_s=0,
        )
    )  # fmt: skip
    settled = findings.committed_at[20:]
    rate = 16 * (len(settled) - 1) / (settled[-1] - settled[0])
    lost = findings.num_masked_tokens / (findings.num_masked_tokens + findings.num_used_tokens)
    return f"{rate / min(slots, 16 / train_s):.2f}/{lost:.0%}/{findings.oldest}"


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


ALL: dict[str, Callable[[], Any]] = {"tasks": tasks, "groups": groups, "memory": memory, "goodput": goodput}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for name in sys.argv[1:] or ALL:
        uvloop.run(ALL[name]())
