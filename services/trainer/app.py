"""The trainer as a process: rank 0 leads or waits, speaks gRPC and decides; the other ranks follow.

data, model -> leadership -> checkpoint or fresh start -> the loop -> the process ends by itself
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from aiohttp import web

from headway.config import ExperimentConfig
from headway.runtime.grpc_server import serve_grpc, serve_health
from headway.runtime.metrics import registry
from headway.runtime.metrics_http import metrics_app, serve_app
from headway.runtime.metrics_table import TRAINER
from headway.runtime.names import NameClient
from headway.runtime.service import Placement, Running
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.v1.trainer_pb2_grpc import add_TrainerServicer_to_server
from headway.v1.weights_pb2_grpc import add_WeightSourceServicer_to_server
from services.trainer.actions import Parts
from services.trainer.broadcast import SOURCE, WeightSender, WeightSourceApi, sender_for
from services.trainer.checkpoint import CheckpointStore
from services.trainer.controller_client import ControllerClient
from services.trainer.data import Data, open_data
from services.trainer.distributed import start_process_group
from services.trainer.grpc_api import SERVICE, TrainerApi
from services.trainer.leadership import Office, leading
from services.trainer.loop import TrainLoop
from services.trainer.metrics import trainer_metrics
from services.trainer.phase_log import PhaseLog
from services.trainer.phases import Phase, Phases
from services.trainer.ranks import Ranks, TorchThread, follow, rank_of_this_process
from services.trainer.start import find_start
from services.trainer.statistics import StatsLogger
from services.trainer.tracing import PhaseTrace, trace
from services.trainer.worker import TorchWorker

CONTROLLER = "services/rollout-controller"
CONTROLLER_WAIT_S = 600.0
log = logging.getLogger(__name__)


@asynccontextmanager
async def run(config: ExperimentConfig, placement: Placement) -> AsyncIterator[Running]:
    """Train until the run is over; the supervisor then ends.

    Raises:
        InvalidInput: The model or the data cannot be used.
    """
    async with serve(config, placement, Phases()) as running:
        yield running


@asynccontextmanager
async def serve(config: ExperimentConfig, placement: Placement, phases: Phases) -> AsyncIterator[Running]:
    """`run`, with a timeline that others listen to."""
    start_process_group()
    worker = TorchWorker(config, phases)
    if rank_of_this_process() > 0:
        async with Supervisor() as supervisor, _first_of_machine(config, placement):
            supervisor.start("follow rank 0", _follow(worker, supervisor))
            yield Running(supervisor)
        return
    worker.sender = sender_for(config, placement.advertise or placement.host)
    ranks = Ranks(worker)
    try:
        async with _rank_zero(config, placement, phases, ranks, worker.sender) as running:
            yield running
    finally:
        await ranks.close()


@asynccontextmanager
async def _rank_zero(
    config: ExperimentConfig, placement: Placement, phases: Phases, ranks: Ranks, sender: WeightSender | None
) -> AsyncIterator[Running]:
    trainer = Trainer(config, placement, phases, ranks)

    def add_services(server: grpc.aio.Server) -> None:
        add_TrainerServicer_to_server(TrainerApi(trainer), server)
        if sender is not None:
            add_WeightSourceServicer_to_server(WeightSourceApi(sender), server)

    async with NameClient(placement.name_resolve, config.run_name) as names, Supervisor() as supervisor:
        async with (
            serve_app(_metrics_app(config, trainer), placement.host, placement.http_port) as http_port,
            serve_grpc(
                placement.host,
                placement.grpc_port,
                add_services,
                [SERVICE] if sender is None else [SERVICE, SOURCE],
            ) as server,
        ):
            metadata = {"http": placement.address(http_port)}
            await names.register(
                f"services/trainer/{placement.instance}", placement.address(server.port), metadata=metadata
            )
            supervisor.start("training", trainer.train(names, supervisor))
            yield Running(supervisor, {"grpc": server.port, "http": http_port})


def _metrics_app(config: ExperimentConfig, trainer: "Trainer | None") -> web.Application:
    """The metrics of rank 0; those of the process alone on other machines."""
    if trainer is None:
        return metrics_app(registry(TRAINER, config.run_name, None))
    return metrics_app(registry(TRAINER, config.run_name, trainer.waits, lambda: trainer_metrics(trainer)))


@asynccontextmanager
async def _first_of_machine(config: ExperimentConfig, placement: Placement) -> AsyncIterator[None]:
    """The first rank of a machine answers health probes and Prometheus there; rank 0 does so with its own services."""
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        yield
        return
    async with (
        serve_health(placement.host, placement.grpc_port),
        serve_app(_metrics_app(config, None), placement.host, placement.http_port),
    ):
        yield


async def _follow(worker: TorchWorker, supervisor: Supervisor) -> None:
    await TorchThread().run(lambda: follow(worker))
    supervisor.stop()


@dataclass
class Trainer:
    """This process's part in the run; also what its gRPC service shows."""

    config: ExperimentConfig
    placement: Placement
    phases: Phases
    ranks: Ranks
    waits: Waits = field(default_factory=Waits)
    phase_log: PhaseLog = field(init=False)
    loop: TrainLoop | None = None
    statistics: StatsLogger | None = None

    def __post_init__(self) -> None:
        self.phase_log = PhaseLog(self.phases)

    async def train(self, names: NameClient, supervisor: Supervisor) -> None:
        """From data and model to the end of the run."""
        data = await asyncio.to_thread(open_data, self.config)
        log.info("%s", data.train.report())
        await self.ranks.call("load", data.length.total_steps)
        self.phases.stay_in(Phase.STANDBY)
        candidate = f"trainer/{self.placement.instance}"
        async with leading(names, candidate, self.waits, supervisor) as office:
            self.phases.stay_in(Phase.STARTING)
            await self._lead(office, data, names, supervisor)
        supervisor.stop()

    async def _lead(self, office: Office, data: "Data", names: NameClient, supervisor: Supervisor) -> None:
        settings = self.config.recover
        checkpoints = CheckpointStore(self.config.paths.recover, settings.keep_last, self.phases.mark)
        start = await find_start(self.config, checkpoints, names)
        self.statistics = await asyncio.to_thread(
            StatsLogger, self.config, data.length.total_steps, start.last_logged_step
        )
        controller = ControllerClient(lambda: _find_controller(names), office.fencing_token, self.waits)
        parts = Parts(
            config=self.config,
            length=data.length,
            term=office.term,
            fencing_token=office.fencing_token,
            ranks=self.ranks,
            controller=controller,
            publisher=names,
            checkpoints=checkpoints,
            statistics=self.statistics,
            phases=self.phases,
            dataset=data.train,
            start_task=supervisor.start,
            evaluation_tasks=data.evaluation_tasks,
            warm_start=data.warm_start,
            trace=self._trace(),
        )
        self.loop = TrainLoop(parts, start)
        try:
            await self.loop.run()
        finally:
            await asyncio.to_thread(self.statistics.close)
            await controller.close()

    def _trace(self) -> PhaseTrace | None:
        settings = self.config.perf_tracer
        if not settings.enabled:
            return None
        return trace(self.phases, self.config.paths.traces / "trainer.json", settings.save_interval)


async def _find_controller(names: NameClient) -> str:
    entries = await names.wait(CONTROLLER, min_entries=1, timeout_s=CONTROLLER_WAIT_S)
    return entries[-1].value
