"""The agent beside one engine: starts it on published weights, registers it when it may be used, ends with it.

    first published version -> start engine from its folder -> load newer ones -> register -> (engine ends | stop)

Guarantee: whoever finds the engine in name-resolve finds it answering, with a version that was the newest one a moment
before. When the block is left, or the engine ends, the name is gone and so is the engine. Health probes over
gRPC hear that it serves only while it is registered: the engine's own /ready may say so while it still catches up.
"""

import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config import ExperimentConfig
from headway.errors import InvalidInput, NotFound, Unavailable
from headway.runtime.grpc_server import serve_health
from headway.runtime.metrics import registry
from headway.runtime.metrics_http import metrics_app, serve_app
from headway.runtime.metrics_table import AGENT
from headway.runtime.names import NameClient, VersionRecord
from headway.runtime.published import Published, adapter_name, read_published
from headway.runtime.service import Placement, Running
from headway.runtime.supervisor import Supervisor
from services.inference.adapter import RunningEngine
from services.inference.child import ask
from services.inference.keys import admin_key, api_key
from services.inference.metrics import AgentStatus
from services.inference.sglang import start_sglang
from services.inference.vllm import start_vllm

log = logging.getLogger(__name__)


Starter = Callable[[ExperimentConfig, Placement, Path, str], AbstractAsyncContextManager[RunningEngine]]


def starter_of(config: ExperimentConfig) -> Starter:
    """What starts the engine that the experiment file names. Only the built-in one needs torch beside the agent."""
    if config.engine == "builtin":
        from services.inference.in_process import start_in_process

        return start_in_process
    return start_sglang if config.engine == "sglang" else start_vllm


@asynccontextmanager
async def run(config: ExperimentConfig, placement: Placement) -> AsyncIterator[Running]:
    """Serve until the block is left; yields when the engine is registered.

    Raises:
        InvalidInput: The engine cannot be started as configured, or the weights are not those that were published.
        Unavailable, TimedOut: The engine ended, or did not answer in time.
    """
    start_engine = starter_of(config)  # what it imports is there before the first version is
    agent = AgentStatus()
    metrics = metrics_app(registry(AGENT, config.run_name, None, agent.metrics))
    async with (
        Supervisor() as supervisor,
        NameClient(placement.name_resolve, config.run_name) as names,
        serve_health(placement.host, placement.grpc_port, is_serving=False) as health,
        serve_app(metrics, placement.host, placement.metrics_port) as metrics_port,
    ):
        record = await _first_version(names)
        published = published_folder(config.paths.weights, record)
        label = record.version.label if published.base is None else published.base.name
        log.info("starting %s on %s", config.engine, label)
        async with start_engine(config, placement, published.model, label) as engine:
            supervisor.start(f"{engine.kind} engine", engine.wait())
            loader = Loader(engine, f"http://{placement.host}:{engine.port}", config, label)
            version = await _catch_up(names, loader, record)
            url = f"http://{placement.address(engine.port)}"
            metadata = {"engine": engine.kind, "version": version, "pid": str(engine.pid)}
            metadata["metrics"] = placement.address(metrics_port)
            registration = await names.register(f"services/inference/{placement.instance}", url, metadata=metadata)
            log.info("registered %s with %s", url, version)
            await health.set_serving(True)
            agent.register(engine.kind, url)
            try:
                yield Running(supervisor, {"grpc": health.port, "http": engine.port, "metrics": metrics_port})
            finally:
                agent.is_registered = False
                await health.set_serving(False)
                await registration.close()


async def _first_version(names: NameClient) -> VersionRecord:
    """Wait for the trainer to publish its first version."""
    log.info("waiting for the first published version")
    async with aclosing(names.watch_versions()) as records:
        async for record in records:
            return record
    raise Unavailable("name-resolve ended the watch of versions")


async def _catch_up(names: NameClient, loader: "Loader", current: VersionRecord) -> str:
    """Load what was published while the engine started, until it serves the newest version; returns that."""
    await loader.load(current)
    while (newest := await names.get_version()) is not None and newest.version > current.version:
        log.info("catching up from %s to %s", current.version.label, newest.version.label)
        await loader.load(newest)
        current = newest
    await loader.verify(current)
    return current.version.label


@dataclass
class Loader:
    """Brings a started engine, which has no requests yet, to published versions."""

    engine: RunningEngine
    url: str
    config: ExperimentConfig
    label: str
    """Of the weights that the engine has, an adapter apart."""

    async def load(self, record: VersionRecord) -> None:
        """Load what the engine does not have of a version: its weights, or its base and its adapter."""
        published = published_folder(self.config.paths.weights, record)
        label = record.version.label if published.base is None else published.base.name
        if label != self.label:
            await self.engine.load(published.model, label)
            self.label = label
        if published.base is not None:
            body = {"lora_name": self._adapter(record), "lora_path": str(published.path)}
            await ask("POST", f"{self.url}/load_lora_adapter", body, key=admin_key(self.config))

    async def verify(self, record: VersionRecord) -> None:
        """Raises: Unavailable, when the engine does not report what it was given."""
        served = await self.engine.served_version()
        if served != self.label:
            raise Unavailable(f"the {self.engine.kind} engine reports version {served} after loading {self.label}")
        if self.label != record.version.label:
            models = await ask("GET", f"{self.url}/v1/models", key=api_key(self.config))
            names = [card["id"] for card in models["data"]]
            if self._adapter(record) not in names:
                raise Unavailable(f"the {self.engine.kind} engine reports {names}, not {self._adapter(record)}")

    def _adapter(self, record: VersionRecord) -> str:
        return adapter_name(self.config.rollout.lora_name, record.version)


def published_folder(weights: Path, record: VersionRecord) -> Published:
    """The folder of a published version.

    Raises:
        NotFound: It, or its base, is not there: this machine does not share the folder with the trainer.
        InvalidInput: Its manifest is not the one that was published.
    """
    folder = weights / record.version.label
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise NotFound(f"{manifest} is not there, but {record.version.label} is published; is cluster.fileroot shared?")
    if hashlib.sha256(manifest.read_bytes()).hexdigest() != record.manifest_sha256:
        raise InvalidInput(f"{manifest} is not the manifest that was published as {record.version.label}")
    return read_published(folder)
