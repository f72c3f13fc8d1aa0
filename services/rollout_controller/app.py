"""The rollout controller as a process: journal, fleet, rewards, controller, and the doors to it.

name-resolve --> reward replicas --> RewardClient --+
     |---------> engine servers ---> Fleet ---------+--> RolloutController --> gRPC (trainer), HTTP (people)
     |---------> published versions --^             |
                                       Journal -----+
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from headway.config import ExperimentConfig
from headway.core.routing import RoutingPolicy
from headway.core.selection import StalenessPolicy
from headway.core.version import PolicyVersion
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.http_server import serve_http
from headway.runtime.names import Entry, NameClient, Put, Removed, Snapshot
from headway.runtime.published import read_published
from headway.runtime.rewards import RewardClient
from headway.runtime.service import Placement, Running
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.v1.rollout_controller_pb2_grpc import add_RolloutControllerServicer_to_server
from headway.view.folder import RunFolder
from headway.view.store import Store
from headway.workflow.load import load_filter
from services.rollout_controller.auth import Access
from services.rollout_controller.control import Control
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.dumps import Dump, FinishedGroup
from services.rollout_controller.fleet import Fleet, FleetOptions
from services.rollout_controller.grpc_api import ControllerApi
from services.rollout_controller.http_api import make_http_api
from services.rollout_controller.journal import Journal
from services.rollout_controller.line_writer import LineWriter
from services.rollout_controller.live import open_live
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, Records, timed
from services.rollout_controller.sessions import GroupSessions, SessionLines
from services.rollout_controller.status import ServerStatus, ServiceStatus, Status, Surroundings
from services.rollout_controller.versions import VersionBook
from services.rollout_controller.weight_source import TrainerSource
from services.rollout_controller.workflows import Workflows

SERVICE = "headway.v1.RolloutController"
NAME = "services/rollout-controller"
SERVERS = "services/inference/"
JOURNAL = "journal.sqlite"
PATIENCE_S = 60.0
log = logging.getLogger(__name__)


@asynccontextmanager
async def run(config: ExperimentConfig, placement: Placement) -> AsyncIterator[Running]:
    """Serve until the block is left.

    Raises:
        InvalidInput: The workflow, its filter or the tokenizer cannot be loaded, a port is in use, or the HTTP API has
            to have a token.
        JournalBroken: The journal cannot be opened.
    """
    access, waits = Access.of(placement.host), Waits()
    async with AsyncExitStack() as stack:
        journal = await stack.enter_async_context(Journal(config.paths.journal / JOURNAL))
        names = await stack.enter_async_context(NameClient(placement.name_resolve, config.run_name))
        rewards = await stack.enter_async_context(RewardClient(config.reward.timeout_s))
        supervisor = await stack.enter_async_context(Supervisor())
        source = TrainerSource(partial(trainers, names)) if config.actor.weight_update_mode == "xccl" else None
        if source is not None:
            stack.push_async_callback(source.close)
        fleet = await stack.enter_async_context(Fleet(fleet_options(config), supervisor, waits, source))
        versions = VersionBook(config.paths.weights, fleet.snapshot)
        await versions.start()
        known = KnownServices(names, fleet, rewards, supervisor, versions)
        supervisor.start("watch services", known.follow_services())
        supervisor.start("watch versions", known.follow_versions())
        supervisor.start("tell long waits", tell_long_waits(waits))
        workflows = Workflows(config, timed(rewards.reward_fn), fleet.engine())
        making = supervisor.start("load the workflow", workflows.make(partial(first_version, names, waits, config)))
        if workflows.has_local_tokenizer:
            await making
        store = stack.enter_context(Store(RunFolder.of(config)))
        records = await stack.enter_async_context(open_records(config, workflows, supervisor, store))
        runners = make_runners(config, workflows, fleet, *records)
        controller = RolloutController(settings_of(config), journal, fleet, *runners, supervisor, waits)
        await controller.start()
        stack.push_async_callback(controller.close)
        control = Control(controller, fleet, waits)
        await control.restore()
        api = ControllerApi(controller, known.versions_in_use)
        status = Status(config.run_name, controller, known, time.monotonic())
        path = config.paths.journal / JOURNAL
        live = await stack.enter_async_context(open_live(status, controller, fleet, waits, names, supervisor, path))
        app = make_http_api(status, controller, access, store, workflows.gateway, live, versions, control)
        http_port = await stack.enter_async_context(serve_http(cast(Any, app), placement.host, placement.http_port))
        stack.callback(live.feed.close)  # streams end before the server does
        workflows.gateway.serve_at(f"http://{placement.address(http_port)}")
        stack.push_async_callback(workflows.gateway.close)
        server = await stack.enter_async_context(
            serve_grpc(
                placement.host,
                placement.grpc_port,
                lambda server: add_RolloutControllerServicer_to_server(api, server),
                [SERVICE],
            )
        )
        metadata = {"http": placement.address(http_port)}
        await names.register(f"{NAME}/{placement.instance}", placement.address(server.port), metadata=metadata)
        yield Running(supervisor, {"grpc": server.port, "http": http_port})


def settings_of(config: ExperimentConfig) -> Settings:
    """The numbers that the controller goes by."""
    rollout = config.rollout
    return Settings(
        batch_size=rollout.consumer_batch_size,
        eta=rollout.max_head_offpolicyness,
        max_concurrent=rollout.max_concurrent_rollouts,
        queue_size=rollout.queue_size,
        policy=StalenessPolicy(rollout.staleness_policy),
        keeps_batches=config.recover.mode != "disabled",
    )


def make_runners(
    config: ExperimentConfig, workflows: Workflows, fleet: Fleet, training_records: Records, evaluation_records: Records
) -> tuple[GroupRunner, Callable[[PolicyVersion], GroupRunner]]:
    """What rolls out tasks to be trained on, and those of an evaluation of a version."""
    rollout = config.rollout
    should_accept = load_filter(config.workflow.should_accept_fn)

    def evaluation(version: PolicyVersion) -> GroupRunner:
        return GroupRunner(
            workflows.evaluation,
            fleet.engine(version),
            config.evaluation_gconfig.n_samples,
            stall_limit_s=rollout.request_timeout,
            is_checked=rollout.check_trajectory_format,
            records=evaluation_records,
        )

    training = GroupRunner(
        workflows.training,
        fleet.engine(),
        config.gconfig.n_samples,
        should_accept,
        rollout.request_timeout,
        rollout.check_trajectory_format,
        training_records,
    )
    return training, evaluation


@asynccontextmanager
async def open_records(
    config: ExperimentConfig, workflows: Workflows, supervisor: Supervisor, store: Store
) -> AsyncIterator[tuple[Records, Records]]:
    """What the file wants to have written of groups, trained on and evaluated; all of it is when the block is left."""
    tracer, paths = config.perf_tracer.session_tracer, config.paths
    async with AsyncExitStack() as stack:
        groups: list[LineWriter[FinishedGroup] | None] = [None, None]
        sessions: LineWriter[GroupSessions] | None = None
        if config.rollout.dump_to_file:
            for number, folder in enumerate((paths.rollouts, paths.eval_rollouts)):
                dump = Dump(folder, workflows.load_tokenizer)
                writer = LineWriter(f"write {folder}", dump.encode, supervisor, written=store.written)
                groups[number] = await stack.enter_async_context(writer)
        if tracer.enabled or config.rollout.enable_rollout_tracing:
            lines = SessionLines(paths.traces)
            sessions = LineWriter(f"write {paths.traces}", lines.encode, supervisor, tracer.flush_threshold)
            await stack.enter_async_context(sessions)
        yield Records("train", groups[0], sessions), Records("evaluation", groups[1], sessions)


def fleet_options(config: ExperimentConfig) -> FleetOptions:
    """How the fleet behaves, from the experiment file."""
    flags = (config.vllm if config.engine == "vllm" else config.sglang).flags()
    return FleetOptions(
        weights_root=config.paths.weights,
        policy=RoutingPolicy(config.rollout.schedule_policy),
        request_timeout_s=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
        max_unavailable=config.rollout.max_unavailable,
        pause_grace_s=config.rollout.pause_grace_period,
        setup_timeout_s=config.rollout.setup_timeout,
        api_key=str(flags.get("api_key") or ""),
        admin_key=str(flags.get("admin_api_key") or ""),
        lora_name=config.rollout.lora_name if config.actor.use_lora else None,
    )


async def trainers(names: NameClient) -> list[str]:
    """Addresses of the trainers that are registered now; one of them leads."""
    return [entry.value for entry in await names.list("services/trainer")]


async def first_version(names: NameClient, waits: Waits, config: ExperimentConfig) -> Path:
    """The folder of the first version that is published, now or later; of its base, where it is an adapter."""
    with waits.waiting_for("the first published version, for its tokenizer"):
        async for record in names.watch_versions():
            folder = config.paths.weights / record.version.label
            return read_published(folder).model if config.actor.use_lora else folder
    raise AssertionError("a watch has no end")


async def tell_long_waits(waits: Waits) -> None:
    """Log each wait once it has lasted `PATIENCE_S`, and again each time that has doubled."""
    told: dict[str, float] = {}
    while True:
        await asyncio.sleep(PATIENCE_S)
        open_waits = waits.snapshot()
        told = {wait.what: told.get(wait.what, 0.0) for wait in open_waits}
        for wait in open_waits:
            if wait.since_s >= max(PATIENCE_S, 2 * told[wait.what]):
                told[wait.what] = wait.since_s
                log.info("waiting for %s, since %.0f s", wait.what, wait.since_s)


class KnownServices(Surroundings):
    """What name-resolve says of the other services, handed on to whom it concerns."""

    def __init__(
        self, names: NameClient, fleet: Fleet, rewards: RewardClient, supervisor: Supervisor, versions: VersionBook
    ) -> None:
        self._versions = versions
        self._names = names
        self._fleet = fleet
        self._rewards = rewards
        self._supervisor = supervisor
        self._entries: dict[str, Entry] = {}

    async def follow_services(self) -> None:
        """waits for: a service that comes or goes     produces: members of the fleet, reward replicas"""
        async for event in self._names.watch("services"):
            match event:
                case Snapshot(entries):
                    self._take_snapshot({entry.name: entry for entry in entries})
                case Put(entry):
                    self._put(entry)
                case Removed(name):
                    self._remove(name)
            self._rewards.set_addresses(
                entry.value for name, entry in self._entries.items() if name.startswith("services/reward/")
            )

    async def follow_versions(self) -> None:
        """waits for: a published version     produces: servers that move to it"""
        async for record in self._names.watch_versions():
            self.published_version = record.version.label
            await self._versions.add(record)
            self._supervisor.start(f"move servers to {record.version.label}", self._move(record.version))

    async def _move(self, version: PolicyVersion) -> None:
        self._versions.moved(await self._fleet.move_to(version))

    def _take_snapshot(self, entries: Mapping[str, Entry]) -> None:
        for name in self._entries.keys() - entries.keys():
            self._remove(name)
        for entry in entries.values():
            self._put(entry)

    def _put(self, entry: Entry) -> None:
        """Note an entry. A server that only says something new of itself, its version, is the same server."""
        before = self._entries.get(entry.name)
        self._entries[entry.name] = entry
        is_new = before is None or (before.value, before.create_revision) != (entry.value, entry.create_revision)
        if is_new and entry.name.startswith(SERVERS):
            self._fleet.add(entry.name.removeprefix(SERVERS), entry.value, entry.metadata.get("engine", "sglang"))

    def _remove(self, name: str) -> None:
        if self._entries.pop(name, None) is not None and name.startswith(SERVERS):
            self._fleet.remove(name.removeprefix(SERVERS))

    def versions_in_use(self) -> set[PolicyVersion]:
        """Versions that servers serve, or are to serve."""
        snapshot = self._fleet.snapshot()
        labels = {snapshot.target, *(engine.version for engine in snapshot.engines)}
        return {PolicyVersion.parse(label) for label in labels if label is not None}

    def services(self) -> list[ServiceStatus]:
        return [_service(self._entries[name]) for name in sorted(self._entries)]

    def servers(self) -> list[ServerStatus]:
        return [
            ServerStatus(
                name=engine.name,
                address=engine.address,
                state="drained" if engine.is_drained else engine.state,
                served_version=engine.version,
                num_requests=engine.requests_running,
                tokens_in_flight=engine.tokens_in_flight,
                since_s=engine.since_s,
                busy_s=engine.busy_s,
                joined_s=engine.joined_s,
                detail=engine.last_error,
            )
            for engine in self._fleet.snapshot().engines
        ]

    def requests_waiting(self) -> int:
        return self._fleet.snapshot().requests_waiting


def _service(entry: Entry) -> ServiceStatus:
    name = entry.name.removeprefix("services/")
    return ServiceStatus(name=name, address=entry.value, metadata=dict(entry.metadata))
