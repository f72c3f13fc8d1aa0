"""Scripted servers behind a real fleet, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import orjson

from headway.core.version import PolicyVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.testing.scripted_engine import ScriptedEngine
from headway.testing.scripted_model import VOCABULARY, logprob_of
from headway.workflow import GenerationHyperparameters, ModelRequest, ModelResponse
from services.rollout_controller import fleet_member
from services.rollout_controller.fleet import Fleet, FleetOptions
from services.rollout_controller.fleet_member import EngineState

V0, V1, V2 = (PolicyVersion(1, step) for step in range(3))
Kind = Literal["sglang", "vllm"]
KINDS: tuple[Kind, ...] = ("sglang", "vllm")
SOON_S = 60.0
PATIENCE_S = 60.0
"""Of the fleet with silent servers: none is silent here because the machine is busy."""


@dataclass
class Rig:
    """A fleet, and the scripted engines that it serves from, by name."""

    fleet: Fleet
    waits: Waits
    supervisor: Supervisor
    root: Path
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)

    def publish(self, version: PolicyVersion) -> Path:
        """Write what the fleet looks for in a version's folder."""
        folder = self.root / version.label
        folder.mkdir()
        (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": VOCABULARY}))
        (folder / "manifest.json").write_text("{}")
        return folder

    def join(self, name: str, engine: ScriptedEngine, address: str | None = None) -> None:
        self.engines[name] = engine
        self.fleet.add(name, address or engine.url, engine.kind)

    async def serving(self, *names: str) -> None:
        """Wait until exactly these servers take requests."""
        await eventually(lambda: set(self.in_state(EngineState.SERVING)) == set(names))

    def in_state(self, state: EngineState) -> list[str]:
        return [engine.name for engine in self.fleet.snapshot().engines if engine.state is state]

    def start(self, ids: Sequence[int] = (5, 6, 7), **gconfig: Any) -> "asyncio.Task[ModelResponse]":
        """Begin a request."""
        return asyncio.create_task(self.fleet.engine().agenerate(request(ids, **gconfig)))

    def holder(self) -> ScriptedEngine:
        """The one engine that holds requests."""
        (engine,) = [engine for engine in self.engines.values() if engine.model.requests]
        return engine

    def other(self, engine: ScriptedEngine) -> ScriptedEngine:
        (other,) = [candidate for candidate in self.engines.values() if candidate is not engine]
        return other


def request(ids: Sequence[int] = (5, 6, 7), **gconfig: Any) -> ModelRequest:
    return ModelRequest(input_ids=list(ids), gconfig=GenerationHyperparameters(**{"max_new_tokens": 10, **gconfig}))


@asynccontextmanager
async def rig_of(tmp_path: Path, *kinds: Kind, patience_s: float = PATIENCE_S, **options: Any) -> AsyncIterator[Rig]:
    """A fleet of scripted engines at v1.0, all of them serving."""
    waits = Waits()
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.object(fleet_member, "FIRST_PATIENCE_S", patience_s))
        engines = [await stack.enter_async_context(ScriptedEngine(kind)) for kind in kinds]
        supervisor = await stack.enter_async_context(Supervisor())
        fleet = await stack.enter_async_context(Fleet(FleetOptions(tmp_path, **options), supervisor, waits))
        rig = Rig(fleet, waits, supervisor, tmp_path)
        rig.publish(V0)
        await fleet.move_to(V0)
        for number, engine in enumerate(engines):
            rig.join(str(number), engine)
        await rig.serving(*rig.engines)
        yield rig


async def eventually(is_true: Callable[[], bool]) -> None:
    """Give the loop time until something holds, or fail after a while."""
    async with asyncio.timeout(SOON_S):
        while not is_true():  # noqa: ASYNC110 - what is looked at is in the servers' processes, too
            await asyncio.sleep(0.002)


async def soon(awaitable: Any) -> Any:
    """The result, or a failure after a while."""
    return await asyncio.wait_for(awaitable, SOON_S)


def check_evidence(response: ModelResponse, prompt: Sequence[int] = (5, 6, 7)) -> None:
    """The scripted tokens count up over the whole sequence, and each log-prob tells which version made its token."""
    begin = len(prompt)
    assert response.output_tokens == [10 + (begin + index) % 500 for index in range(response.output_len)]
    assert response.output_logprobs == [logprob_of(f"v1.{step}") for step in response.output_versions]
