"""What the rollout controller costs.

    python -m benchmarks.controller [tasks] [batches] [memory] [--rounds 3] [--areal PYTHON]

tasks    No-op rollouts a second through `BatchTaskDispatcher`, under the staleness budget, taken batch by batch.
batches  Rollouts of 0.1 to 0.5 s (uniform): rollouts a second of the whole controller, journal fsynced, as a share of
         the limit min(concurrency / mean length, batch / train time). `bound`: training takes half the time of
         generation; `balanced`: as long.
memory   Resident memory after 1,000 and after 100,000 rollouts.

PYTHON is that of an environment with areal 1.0.4: its WorkflowExecutor does the same in a process of its own, in turns
with ours; medians of the rounds.
"""

import argparse
import asyncio
import logging
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.instant_fleet import InstantFleet
from headway.core.staleness import StalenessManager
from headway.core.trajectory import NO_VERSION, Trajectory
from headway.core.version import PolicyVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.workflow.api import InferenceEngine, RolloutWorkflow
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.dispatcher import BatchTaskDispatcher
from services.rollout_controller.journal import Journal
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, TaskInput

ETA = 3
SHORTEST_S, LONGEST_S = 0.1, 0.5
MEAN_S = (SHORTEST_S + LONGEST_S) / 2
NO_OP_SIZES = ((256, 64), (1024, 256))
"""Concurrent rollouts, batch."""
SLOTS = BATCH = 64
TRAIN_S = {"bound": MEAN_S * BATCH / SLOTS / 2, "balanced": MEAN_S * BATCH / SLOTS}
MEASURE_S = 12.0
CHECKPOINT_EVERY = 10
"""Steps."""

AREAL = """
import asyncio, logging, random, sys, time
logging.disable(logging.WARNING)
from areal.api.cli_args import InferenceEngineConfig
from areal.infra.workflow_executor import WorkflowExecutor

slots, batch, eta, shortest, longest, train_s, seconds = map(float, sys.argv[1:])

class Engine:
    version = 0
    def get_version(self):
        return self.version

class Loader:
    batch_size = int(batch)
    def __iter__(self):
        while True:
            yield [{} for _ in range(self.batch_size)]

class Workflow:
    async def arun_episode(self, engine, data):
        if longest:
            await asyncio.sleep(random.uniform(shortest, longest))
        return {"version": engine.get_version()}

engine = Engine()
config = InferenceEngineConfig(
    max_concurrent_rollouts=int(slots), consumer_batch_size=int(batch), max_head_offpolicyness=int(eta),
    check_trajectory_format=False,
)
executor = WorkflowExecutor(config, engine)
executor.initialize(logger=logging.getLogger("bench"))
loader, workflow, done = Loader(), Workflow(), 0
for warm in (True, False):
    done, until, began = 0, time.perf_counter() + (seconds / 4 if warm else seconds), time.perf_counter()
    while time.perf_counter() < until:
        done += len(executor.prepare_batch(loader, workflow))
        time.sleep(train_s)
        engine.version += 1
    rate = done / (time.perf_counter() - began)
print(rate, flush=True)
executor.destroy()
"""


def areal(python: str, slots: int, batch: int, lengths: tuple[float, float], train_s: float, seconds: float) -> float:
    """Rollouts a second of AReaL's executor."""
    numbers = (slots, batch, ETA, *lengths, train_s, seconds)
    words = [python, "-c", AREAL, *map(str, numbers)]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return float(output.splitlines()[-1])


# ---- tasks


@dataclass(frozen=True, slots=True)
class Named:
    """A task of nothing."""

    task_id: str


async def no_ops(slots: int, batch: int, seconds: float = 6.0) -> float:
    """No-op rollouts a second."""

    async def nothing() -> int:
        return 1

    fleet = InstantFleet()
    fleet.publish(0)
    budget = StalenessManager(fleet, slots, batch, ETA)
    dispatcher: BatchTaskDispatcher[Named, int] = BatchTaskDispatcher(16 * batch, lambda _: nothing, budget)
    step, began = 0, time.perf_counter()
    for row in range(2 * batch):
        dispatcher.submit_task_input(Named(str(row)))
    while time.perf_counter() - began < seconds:
        for row in range(batch):
            dispatcher.submit_task_input(Named(str(row)))
        assert len(await dispatcher.wait_results(batch)) == batch
        step += 1
        fleet.publish(step)
        dispatcher.wake()
    rate = step * batch / (time.perf_counter() - began)
    await dispatcher.close()
    return rate


async def tasks(rounds: int, python: str) -> None:
    for slots, batch in NO_OP_SIZES:

        async def theirs(slots: int = slots, batch: int = batch) -> float:
            return await asyncio.to_thread(areal, python, slots, batch, (0.0, 0.0), 0.0, 6.0)

        peers: dict[str, Callable[[], Awaitable[float]]] = {"headway": lambda s=slots, b=batch: no_ops(s, b)}
        found = await in_turns(peers | ({"areal": theirs} if python else {}), rounds)
        print(f"tasks, {slots} slots, batches of {batch}: {shown(found, 1.0, ' no-op rollouts/s')}", flush=True)


# ---- batches


class Sleeping(RolloutWorkflow):
    """A sample of four tokens that takes a while."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._lengths = shortest_s, longest_s
        self._made = np.array([False, True, True, True])
        self._random = random.Random(0)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        versions = np.where(self._made, np.int32(engine.get_version()), np.int32(NO_VERSION))
        if self._lengths[1]:
            await asyncio.sleep(self._random.uniform(*self._lengths))
        zeros = np.zeros(4, np.float32)
        return Trajectory(np.zeros(4, np.int32), zeros, self._made, versions, 1.0)


class Run:
    """A controller, and a trainer that does what the real one does, without a wire."""

    def __init__(self, controller: RolloutController, fleet: InstantFleet, batch: int) -> None:
        self.controller = controller
        self.step = 0
        self._fleet = fleet
        self._batch = batch
        self._row = 0
        self._fetching: asyncio.Task[None] | None = None

    async def train(self, train_s: float = 0.0) -> None:
        """One step: the next batch is fetched, and tasks are submitted, while it is published and committed."""
        await (self._fetching or self._fetch())
        submitting = asyncio.create_task(self._submit())
        await asyncio.sleep(train_s)
        self.step += 1
        self._fetching = asyncio.create_task(self._fetch())
        self._fleet.publish(self.step)
        stats = {f"statistic/{number}": 0.5 for number in range(160)}
        await self.controller.commit(self.step - 1, 1, PolicyVersion(1, self.step), stats)
        if self.step % CHECKPOINT_EVERY == 0:
            await self.controller.forget_before(self.step, 1)
        await submitting

    async def close(self) -> None:
        """Let go of the batch that is being fetched."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})

    async def _submit(self) -> None:
        wanted = (ETA + 2) * self._batch - self.controller.ledger.num_open
        await self.controller.submit([TaskInput(f"0/{self._row + row}", b"{}") for row in range(wanted)])
        self._row += max(0, wanted)

    async def _fetch(self) -> None:
        step = self.step
        if step == 0:
            await self._submit()
        await self.controller.fetch_batch(step, self._batch, 1)
        num_groups = sum([len(page) async for page in self.controller.groups(step)])
        assert num_groups == self._batch


@asynccontextmanager
async def running(slots: int, batch: int, workflow: RolloutWorkflow) -> AsyncIterator[Run]:
    """A controller on a journal in a temporary folder."""
    settings = Settings(batch, eta=ETA, max_concurrent=slots, queue_size=32 * batch)
    fleet = InstantFleet()
    runner = GroupRunner(workflow, fleet, 1)
    with tempfile.TemporaryDirectory() as folder:
        async with Journal(Path(folder) / "journal.sqlite") as journal, Supervisor() as supervisor:
            made = RolloutController(settings, journal, fleet, runner, lambda _: runner, supervisor, Waits())
            await made.start()
            await made.begin(1, 0, is_fresh=True)
            fleet.publish(0)
            run = Run(made, fleet, batch)
            yield run
            await run.close()
            await made.close()


async def sleeping(train_s: float) -> float:
    """Rollouts a second of the whole controller."""
    async with running(SLOTS, BATCH, Sleeping(SHORTEST_S, LONGEST_S)) as run:
        first, began = 0, 0.0
        for seconds in (MEASURE_S / 4, MEASURE_S):
            first, began = run.step, time.perf_counter()
            while time.perf_counter() - began < seconds:
                await run.train(train_s)
        return (run.step - first) * BATCH / (time.perf_counter() - began)


async def batches(rounds: int, python: str) -> None:
    for name, train_s in TRAIN_S.items():
        limit = min(SLOTS / MEAN_S, BATCH / train_s)

        async def theirs(train_s: float = train_s) -> float:
            lengths = (SHORTEST_S, LONGEST_S)
            return await asyncio.to_thread(areal, python, SLOTS, BATCH, lengths, train_s, MEASURE_S)

        peers: dict[str, Callable[[], Awaitable[float]]] = {"headway": lambda t=train_s: sleeping(t)}
        found = await in_turns(peers | ({"areal": theirs} if python else {}), rounds)
        print(f"batches, {name}: {shown(found, limit, ' of the limit', digits=3)}", flush=True)


# ---- memory


async def memory(rounds: int, python: str) -> None:
    batch = 32
    async with running(2 * batch, batch, Sleeping(0.0, 0.0)) as run:
        while run.step <= 100_000 // batch:
            await run.train()
            if run.step in (1_000 // batch, 100_000 // batch):
                print(f"memory: {_resident_mb():.1f} MB after {run.step * batch:,} rollouts", flush=True)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


# ---- all


async def in_turns(peers: dict[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, list[float]]:
    """Rates of each peer, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, measure in peers.items():
            found[name].append(await measure())
    return found


def shown(found: dict[str, list[float]], limit: float, unit: str, digits: int = 0) -> str:
    """Medians, and the median ratio."""
    medians = {name: statistics.median(rates) / limit for name, rates in found.items()}
    words = ", ".join(f"{name} {value:,.{digits}f}{unit}" for name, value in medians.items())
    if "areal" not in found:
        return words
    ratio = statistics.median(ours / theirs for ours, theirs in zip(found["headway"], found["areal"], strict=True))
    return f"{words}; {ratio:.2f}x"


ALL: dict[str, Callable[[int, str], Awaitable[None]]] = {"tasks": tasks, "batches": batches, "memory": memory}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *ALL])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--areal", default="", help="Python of an environment with areal 1.0.4")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    for chosen in arguments.names or ALL:
        uvloop.run(ALL[chosen](arguments.rounds, arguments.areal))
