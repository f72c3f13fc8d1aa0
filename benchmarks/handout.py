"""What it costs to hand groups to a trainer: Submit, dispatch, journal (fsynced), FetchBatch and Commit over gRPC.

    python -m benchmarks.handout [--rounds 5] [--steps 20]

`headway`  the controller as it is, with rollouts that are there already; used as the trainer uses it: it asks for the
           next batch, publishes, commits, submits
`bare`     a grpc.aio service that takes the same tasks and streams the same messages, with nothing behind them
`disk`     the same, which writes what it streams into SQLite first, one fsynced transaction a batch: the limit of
           whoever keeps groups on disk before it hands them out

Client and server share one process. Peers take turns; medians. `of disk` is the fraction of that limit.
"""

import argparse
import asyncio
import logging
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
import uvloop

from benchmarks.instant_fleet import InstantFleet
from headway.core.trajectory import NO_VERSION, Outcome, Trajectory
from headway.core.version import PolicyVersion
from headway.runtime.grpc_client import connect
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.runtime.wire import group_from_bytes, trajectory_to_wire, version_to_wire
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerStub, add_RolloutControllerServicer_to_server
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.grpc_api import ControllerApi
from services.rollout_controller.journal import Journal
from services.rollout_controller.journal_store import SQLITE_PAGE_BYTES
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, RolloutEnd, TaskInput

BATCH = 64
AHEAD = 4
"""Batches that are submitted and not trained on."""
SIZES = ((16, 16, 12), (8, 128, 512), (8, 128, 2048))
"""Samples of a group, tokens of a prompt, tokens of a completion."""
ROW = orjson.dumps({"prompt": "sort 12345678=", "answer": "12345678"})


class Prepared(GroupRunner):
    """Rollouts that are there already: one group for each version."""

    def __init__(self, fleet: InstantFleet, size: tuple[int, int, int]) -> None:
        self._fleet = fleet
        self._size = size

    async def run(self, task: TaskInput, attempt: int, num_samples: int | None = None) -> RolloutEnd:
        version = self._fleet.get_version()
        num_samples, _, num_tokens = self._size
        group = types_pb2.Group(task_id=task.task_id, trajectories=_samples(self._size, version), attempt=attempt)
        return RolloutEnd(Outcome.ACCEPTED, "", group, {version: num_samples * num_tokens})


@lru_cache(maxsize=8)
def _samples(size: tuple[int, int, int], version: int) -> list[types_pb2.Trajectory]:
    num_samples, num_prompt, num_tokens = size
    made = np.arange(num_prompt + num_tokens) >= num_prompt
    ids, logprobs = np.arange(len(made), dtype=np.int32), np.where(made, -1.0, 0.0).astype(np.float32)
    versions = np.where(made, np.int32(version), np.int32(NO_VERSION))
    return [trajectory_to_wire(Trajectory(ids, logprobs, made, versions, 1.0))] * num_samples


class Bare(ControllerApi):
    """The same messages, with nothing behind them, or a write to the disk."""

    def __init__(self, controller: RolloutController, replies: Sequence[pb.FetchBatchReply], path: Path | None) -> None:
        super().__init__(controller, list)
        self._replies = replies
        self._db = None if path is None else sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if self._db is not None:
            self._db.execute(f"PRAGMA page_size = {SQLITE_PAGE_BYTES}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("CREATE TABLE payloads (id INTEGER PRIMARY KEY, payload BLOB)")

    async def Submit(self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Any) -> pb.SubmitReply:
        async for _ in request_iterator:
            pass
        return pb.SubmitReply()

    async def FetchBatch(self, request: pb.FetchBatchRequest, context: Any) -> AsyncIterator[pb.FetchBatchReply]:
        if self._db is not None:
            await asyncio.to_thread(self._write)
        for reply in self._replies:
            yield reply

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitReply:
        return pb.CommitReply()

    def _write(self) -> None:
        assert self._db is not None
        self._db.execute("BEGIN IMMEDIATE")
        rows = [(payload,) for reply in self._replies for payload in reply.groups]
        self._db.executemany("INSERT INTO payloads (payload) VALUES (?)", rows)
        self._db.execute("COMMIT")


@dataclass(frozen=True)
class Trainer:
    """Does with a stub what the trainer does."""

    stub: Any

    async def submit(self, first: int, count: int) -> None:
        tasks = [types_pb2.Task(task_id=f"0/{first + number}", data_json=ROW) for number in range(count)]

        async def requests() -> AsyncIterator[pb.SubmitRequest]:
            yield pb.SubmitRequest(tasks=tasks)

        await self.stub.Submit(requests())

    async def fetch(self, step: int) -> list[pb.FetchBatchReply]:
        request = pb.FetchBatchRequest(step=step, num_groups=BATCH, fencing_token=1)
        replies = [reply async for reply in self.stub.FetchBatch(request)]
        groups = [group_from_bytes(group) for reply in replies for group in reply.groups]
        assert len(groups) == BATCH
        return replies

    async def commit(self, step: int) -> None:
        version = version_to_wire(PolicyVersion(1, step + 1))
        await self.stub.Commit(pb.CommitRequest(step=step, fencing_token=1, version=version))

    async def train(self, num_steps: int, publish: Callable[[int], None]) -> list[pb.FetchBatchReply]:
        """Steps that take no time; returns the last batch."""
        fetching = asyncio.ensure_future(self.fetch(0))
        for step in range(num_steps):
            await fetching
            fetching = asyncio.ensure_future(self.fetch(step + 1))
            publish(step + 1)
            await self.commit(step)
            await self.submit((step + AHEAD) * BATCH, BATCH)
        return await fetching


@asynccontextmanager
async def controller(folder: Path, fleet: InstantFleet, size: tuple[int, int, int]) -> AsyncIterator[RolloutController]:
    """A controller on a journal in a folder, led by nobody yet."""
    settings = Settings(BATCH, eta=2, max_concurrent=2 * BATCH, queue_size=32 * BATCH)
    runner = Prepared(fleet, size)
    async with Journal(folder / "journal.sqlite") as journal, Supervisor() as supervisor:
        made = RolloutController(settings, journal, fleet, runner, lambda _: runner, supervisor, Waits())
        await made.start()
        await made.begin(1, 0, is_fresh=True)
        yield made
        await made.close()


@asynccontextmanager
async def trainer_of(servicer: ControllerApi) -> AsyncIterator[Trainer]:
    """A trainer that speaks with it."""

    def add(server: grpc.aio.Server) -> None:
        add_RolloutControllerServicer_to_server(servicer, server)

    async with serve_grpc("127.0.0.1", 0, add, []) as server, connect(f"127.0.0.1:{server.port}") as channel:
        yield Trainer(RolloutControllerStub(channel))


async def one_round(size: tuple[int, int, int], num_steps: int) -> dict[str, tuple[float, float, float]]:
    """Groups a second, CPU milliseconds a group, and bytes a group, of each peer."""
    results = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = InstantFleet()
        made = await stack.enter_async_context(controller(folder, fleet, size))
        trainer = await stack.enter_async_context(trainer_of(ControllerApi(made, list)))
        await trainer.submit(0, AHEAD * BATCH)
        fleet.publish(0)
        replies, results["headway"] = await measured(trainer, num_steps, fleet.publish)
        for name, path in (("bare", None), ("disk", folder / "bare.sqlite")):
            peer = await stack.enter_async_context(trainer_of(Bare(made, replies, path)))
            _, results[name] = await measured(peer, num_steps, lambda step: None)
    return results


async def measured(
    trainer: Trainer, num_steps: int, publish: Callable[[int], None]
) -> tuple[list[pb.FetchBatchReply], tuple[float, float, float]]:
    began, cpu = time.perf_counter(), time.process_time()
    replies = await trainer.train(num_steps, publish)
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    num_groups, num_bytes = (num_steps + 1) * BATCH, sum(reply.ByteSize() for reply in replies)
    return replies, (num_groups / took, spent * 1e3 / num_groups, num_bytes / BATCH)


async def main(num_rounds: int, num_steps: int) -> None:
    columns = f"{'samples':>7} {'tokens':>6} {'peer':>8} {'groups/s':>9} {'MB/s':>7} {'CPU ms/group':>13}"
    print(f"{columns} {'of bare':>8} {'of disk':>8}")
    for size in SIZES:
        rounds = [await one_round(size, num_steps) for _ in range(num_rounds)]
        for name in ("headway", "bare", "disk"):
            rate, cpu_ms, size_bytes = map(statistics.median, zip(*(found[name] for found in rounds), strict=True))
            of_bare, of_disk = (
                statistics.median(found[name][0] / found[peer][0] for found in rounds) for peer in ("bare", "disk")
            )
            row = f"{size[0]:>7} {size[2]:>6} {name:>8} {rate:>9,.0f} {rate * size_bytes / 1e6:>7.1f} {cpu_ms:>13.3f}"
            print(f"{row} {of_bare:>8.2f} {of_disk:>8.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    uvloop.run(main(arguments.rounds, arguments.steps))
