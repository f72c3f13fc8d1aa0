"""A run of the whole system in virtual time, from a seed: the real rollout controller among models of everything else.

    Scenario.of(seed) --> Simulation(scenario, adapter).run() --> Findings, or the broken invariant with its seed

Model servers generate, take versions, get lost and come back (`model_fleet`). A model trainer does what the real one
does (`model_trainer`). Calls between the two are lost, or delivered twice. Rewards are slow or fail, some prompts are
poison, the controller is killed with writes in flight. What must hold whatever happens, and when it is looked at, is
in `invariants`.

The same seed gives the same run, event by event.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import orjson

from headway.errors import StaleVersion, Unavailable
from headway.runtime.supervisor import Supervisor
from headway.testing.invariants import Broken, Findings, Invariants
from headway.testing.model_fleet import ModelFleet, ModelWorkflow
from headway.testing.model_trainer import Checkpoint, Controller, ModelTrainer
from headway.testing.scenario import RETRY_S, Fault, Scenario
from headway.testing.virtual_time import VirtualLoop, run_virtual
from headway.workflow.api import ModelRequest
from headway.workflow.errors import RewardFailed, RewardTimeout

T = TypeVar("T")
LIMIT_S = 3600.0
"""A run that takes longer, in virtual time, is stuck."""


class Process(Controller, Protocol):
    """The rollout controller as a process."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Disk(Protocol):
    """What survives a kill of the controller."""

    def open(self) -> Any:
        """A journal for a new life of the controller."""
        ...

    def kill(self, writes_first: bool) -> None:
        """The controller is gone: what it had not written is lost; `writes_first`: written, but nobody was told."""
        ...

    def known(self, task_ids: Sequence[str]) -> set[str]: ...


class Adapter(Protocol):
    """Makes the real things; the simulation itself imports no service."""

    def make_disk(self, simulation: "Simulation") -> Disk: ...

    def make_controller(self, simulation: "Simulation", supervisor: Supervisor) -> Process:
        """A controller on `simulation.disk`, `simulation.fleet` and `simulation.workflow`."""
        ...

    def make_task(self, task_id: str, data_json: bytes) -> Any: ...


class Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, adapter: Adapter) -> None:
        self.scenario = scenario
        self.invariants = Invariants(scenario)
        self.rng = random.Random(scenario.seed + 1)
        self._adapter = adapter
        self._checkpoint = Checkpoint()
        self._token = 0
        self._served = 0
        """The newest step that all servers have served."""
        self._controller: Process | None = None
        self._dying: asyncio.Future[None]

    def run(self) -> Findings:
        """Run to the end.

        Raises:
            Broken: An invariant does not hold, or the run is stuck; the message names it and the seed.
        """
        try:
            return run_virtual(self._run())
        except Exception as error:  # whatever breaks a run must be told with the seed that brings it back
            raise Broken(f"seed {self.scenario.seed}: {type(error).__name__}: {error}; {self.scenario}") from error

    async def _run(self) -> Findings:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.now = loop.time
        self.disk = self._adapter.make_disk(self)
        scenario = self.scenario
        self.fleet = ModelFleet(scenario.num_servers, scenario.tokens_per_s, self._length_of, scenario.load_s)
        self.workflow = ModelWorkflow(self._score)
        loop.call_every_turn(self._check_turn)
        async with asyncio.timeout(LIMIT_S), Supervisor() as supervisor:
            self._start_controller(supervisor)
            self.fleet.publish(0)
            self._start_trainer(supervisor)
            faults = [supervisor.start(f"{fault}", self._break(fault, supervisor)) for fault in scenario.faults]
            await self._until_over(supervisor, faults)
            controller = await self._reach_controller()
            self._process.cancel()
            await asyncio.wait({self._process})
        self.invariants.check_end(controller.ledger, sum(len(server.running) for server in self.fleet.servers))
        self.invariants.findings.seconds = loop.time()
        return self.invariants.findings

    async def _until_over(self, supervisor: Supervisor, faults: Sequence["asyncio.Task[None]"]) -> None:
        """waits for: the last step, and all faults to be over     unblocked by: them, or the first failure"""
        failed = asyncio.ensure_future(supervisor.wait())
        while running := {task for task in (*faults, self._trainer) if not task.done()}:
            await asyncio.wait({failed, *running}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        failed.cancel()

    def _check_turn(self) -> None:
        if self._controller is not None:
            self._served = max(self._served, self.fleet.served_step or 0)
            self.invariants.check_turn(self._controller.ledger, self._served, len(self.workflow.running))

    # ---- the controller's process, and the way to it

    def _start_controller(self, supervisor: Supervisor) -> None:
        self._dying = asyncio.get_running_loop().create_future()
        self._process = supervisor.start("controller", self._run_controller())

    async def _run_controller(self) -> None:
        async with Supervisor() as supervisor:
            controller = self._adapter.make_controller(self, supervisor)
            await controller.start()
            acknowledged = self.invariants.acknowledged
            self.invariants.check_recovered(controller.ledger, self.disk.known(sorted(acknowledged)))
            self._controller = controller
            try:
                await supervisor.wait()
            finally:
                self._controller = None
                await controller.close()

    async def _kill_controller(self, supervisor: Supervisor, down_s: float) -> None:
        if self._controller is None:
            return
        process = self._process
        self.disk.kill(writes_first=self.rng.random() < 0.5)
        self._dying.set_result(None)
        process.cancel()
        await asyncio.wait({process})
        await asyncio.sleep(down_s)
        self._start_controller(supervisor)

    async def _reach_controller(self) -> Process:
        async def itself(controller: Process) -> Process:
            return controller

        return await self.call(itself)

    async def call(self, use: Callable[[Process], Awaitable[T]]) -> T:
        """Call the controller over a network that loses replies and delivers some calls twice, until it answers."""
        while True:
            try:
                return await self._try(use)
            except Unavailable:
                await asyncio.sleep(self.rng.uniform(0.05, RETRY_S))

    async def _try(self, use: Callable[[Process], Awaitable[T]]) -> T:
        if self.rng.random() < self.scenario.p_twice:
            await self._deliver(use)
        reply = await self._deliver(use)
        if self.rng.random() < self.scenario.p_lost_reply:
            raise Unavailable("the reply was lost")
        return reply

    async def _deliver(self, use: Callable[[Process], Awaitable[T]]) -> T:
        controller, dying = self._controller, self._dying
        if controller is None:
            raise Unavailable("the controller is away")
        working = asyncio.ensure_future(use(controller))
        ends: set[asyncio.Future[Any]] = {working, dying}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise Unavailable("the connection broke")
            return working.result()
        finally:
            working.cancel()

    # ---- faults

    async def _break(self, fault: Fault, supervisor: Supervisor) -> None:
        await asyncio.sleep(fault.at_s)
        match fault.kind:
            case "server":
                await self._lose_server(fault)
            case "controller":
                await self._kill_controller(supervisor, fault.down_s)
            case "trainer" | "zombie":
                await self._replace_trainer(fault, supervisor)
        self.invariants.last_fault_s = max(self.invariants.last_fault_s, self.now())

    async def _lose_server(self, fault: Fault) -> None:
        server = self.fleet.servers[fault.which % len(self.fleet.servers)]
        if server.is_up:
            self.fleet.lose(server)
            await asyncio.sleep(fault.down_s)
            self.fleet.bring_back(server)

    async def _replace_trainer(self, fault: Fault, supervisor: Supervisor) -> None:
        old = self._trainer
        if old.done():
            return
        if fault.kind == "trainer":
            old.cancel()
            await asyncio.sleep(fault.down_s)
        if self._trainer is old:
            self._start_trainer(supervisor)

    # ---- what trainers find around them

    def _start_trainer(self, supervisor: Supervisor) -> None:
        self._token += 1
        self._trainer = supervisor.start(f"trainer {self._token}", self._lead(self._token))

    async def _lead(self, token: int) -> None:
        try:
            await ModelTrainer(self, token, self._checkpoint).run()
        except StaleVersion as refused:
            if token == self._token:
                raise Broken(f"I7: the newest leader was refused: {refused}") from refused

    @property
    def published(self) -> int:
        return self.fleet.published

    def publish(self, token: int, step: int) -> None:
        if token < self._token:
            raise StaleVersion("a newer leader exists")
        self.fleet.publish(step)

    def save(self, token: int, checkpoint: Checkpoint) -> None:
        if token < self._token:
            raise StaleVersion("a newer leader exists")
        self._checkpoint = checkpoint

    def make_task(self, row: int) -> Any:
        data = {"row": row, "is_poison": self.scenario.is_poison(row)}
        return self._adapter.make_task(f"0/{row}", orjson.dumps(data))

    # ---- chance

    def _length_of(self, request: ModelRequest) -> int:
        scenario, rng = self.scenario, self.rng
        if scenario.sigma < 0:
            length = rng.uniform(1, 2 * scenario.mean_tokens)
        else:
            length = scenario.mean_tokens * math.exp(rng.gauss(0.0, scenario.sigma) - scenario.sigma**2 / 2)
        return max(1, min(scenario.max_tokens, round(length)))

    async def _score(self, data: dict[str, Any]) -> float | None:
        scenario = self.scenario
        slow, fails, rejected = (self.rng.random() for _ in range(3))
        await asyncio.sleep(scenario.slow_reward_s if slow < scenario.p_slow_reward else scenario.reward_s)
        if fails < scenario.p_reward_fails:
            raise RewardTimeout("too slow") if fails < scenario.p_reward_fails / 2 else RewardFailed("died")
        return None if rejected < scenario.p_rejected / scenario.num_samples else 1.0
