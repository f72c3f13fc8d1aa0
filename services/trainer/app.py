"""The trainer as a process: rank 0 leads or waits, speaks gRPC and decides; the other ranks follow.

data, model -> leadership -> checkpoint or fresh start -> the loop -> the process ends by itself
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import grpc

from headway.config import ExperimentConfig
from headway.data import Dataset, Task, open_dataset
from headway.errors import InvalidInput
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.names import NameClient
from headway.runtime.service import Placement, Running
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.v1.trainer_pb2_grpc import add_TrainerServicer_to_server
from headway.v1.weights_pb2_grpc import add_WeightSourceServicer_to_server
from services.trainer.broadcast import SOURCE, WeightSender, WeightSourceApi, sender_for
from services.trainer.checkpoint import CheckpointStore
from services.trainer.controller_client import ControllerClient
from services.trainer.distributed import start_process_group
from services.trainer.grpc_api import SERVICE, TrainerApi
from services.trainer.leadership import Office, leading
from services.trainer.loop import Parts, Start, TrainLoop
from services.trainer.phases import Phase, Phases
from services.trainer.ranks import Ranks, follow, rank_of_this_process
from services.trainer.schedule import RunLength
from services.trainer.statistics import StatsLogger
from services.trainer.tracing import PhaseTrace, trace
from services.trainer.warm_start import WarmStartPlan, plan_warm_start
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
        async with Supervisor() as supervisor:
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
        async with serve_grpc(
            placement.host,
            placement.grpc_port,
            add_services,
            [SERVICE] if sender is None else [SERVICE, SOURCE],
        ) as server:
            await names.register(f"services/trainer/{placement.instance}", placement.address(server.port))
            supervisor.start("training", trainer.train(names, supervisor))
            yield Running(supervisor, {"grpc": server.port})


async def _follow(worker: TorchWorker, supervisor: Supervisor) -> None:
    await asyncio.to_thread(follow, worker)
    supervisor.stop()


@dataclass
class Trainer:
    """This process's part in the run; also what its gRPC service shows."""

    config: ExperimentConfig
    placement: Placement
    phases: Phases
    ranks: Ranks
    waits: Waits = field(default_factory=Waits)
    loop: TrainLoop | None = None
    statistics: StatsLogger | None = None

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
        step = start.checkpoint.record.version.step if start.checkpoint else 0
        self.statistics = StatsLogger(self.config, data.length.total_steps, step)
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
            self.statistics.close()
            await controller.close()

    def _trace(self) -> PhaseTrace | None:
        settings = self.config.perf_tracer
        if not settings.enabled:
            return None
        return trace(self.phases, self.config.paths.traces / "trainer.json", settings.save_interval)


async def _find_controller(names: NameClient) -> str:
    entries = await names.wait(CONTROLLER, min_entries=1, timeout_s=CONTROLLER_WAIT_S)
    return entries[-1].value


async def find_start(config: ExperimentConfig, checkpoints: CheckpointStore, names: NameClient) -> Start:
    """Where training begins, as `recover.mode` says.

    Raises:
        InvalidInput: Mode `resume`, and there is no complete checkpoint.
    """
    mode = config.recover.mode
    is_wanted = mode in ("auto", "resume") or (mode == "fault" and not checkpoints.is_finished)
    checkpoint = await asyncio.to_thread(checkpoints.newest) if is_wanted else None
    if mode == "resume" and checkpoint is None:
        raise InvalidInput(f"recover.mode is resume, and {checkpoints.root} holds no complete checkpoint")
    await asyncio.to_thread(checkpoints.remove_leftovers)
    if mode != "disabled":
        await asyncio.to_thread(checkpoints.mark_finished, False)
    published = await names.get_version() if is_wanted else None
    is_fresh = checkpoint is None and published is None
    return Start(checkpoint, published.version.step if published else -1, is_fresh)


@dataclass(frozen=True)
class Data:
    """What is trained and evaluated on."""

    train: Dataset
    length: RunLength
    evaluation_tasks: list[Task]
    warm_start: WarmStartPlan | None


def open_data(config: ExperimentConfig) -> Data:
    """Read the datasets, and plan what follows from them.

    Raises:
        InvalidInput: They cannot be read, or do not fit the rest of the file.
    """
    tokenizer = load_tokenizer(config.tokenizer_path)
    train = open_dataset(config.train_dataset, tokenizer, config.seed)
    valid = open_dataset(config.valid_dataset, tokenizer, config.seed) if config.valid_dataset is not None else None
    check_longest(config, train)
    length = RunLength.of(config, train.tasks_per_epoch)
    plan = plan_warm_start(config, train, valid, tokenizer) if config.warm_start is not None else None
    return Data(train, length, evaluation_tasks(config, valid), plan)


def load_tokenizer(path: str) -> Any:
    """A transformers tokenizer.

    Raises:
        InvalidInput: There is none at `path`.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInput(f"tokenizer_path {path}: no tokenizer can be loaded there: {reason}") from error


def check_longest(config: ExperimentConfig, train: Dataset) -> None:
    """Refuse, before anything runs, prompts whose completion would fit into no micro-batch.

    Raises:
        InvalidInput: Names the task.
    """
    budget = config.actor.mb_spec.max_tokens_per_mb
    task_id, prompt_tokens = train.longest_prompt()
    longest = min(prompt_tokens + config.gconfig.max_new_tokens, config.gconfig.max_tokens)
    if budget is not None and longest > budget:
        raise InvalidInput(
            f"task {task_id} has a prompt of {prompt_tokens} tokens; with gconfig.max_new_tokens "
            f"({config.gconfig.max_new_tokens}) that is more than actor.mb_spec.max_tokens_per_mb ({budget}); "
            f"raise it, or set train_dataset.max_length"
        )


def evaluation_tasks(config: ExperimentConfig, valid: Dataset | None) -> list[Task]:
    """The rows that are evaluated on, as tasks."""
    if valid is None:
        return []
    limit = min(valid.tasks_per_epoch, config.evaluator.max_rows or valid.tasks_per_epoch)
    return list(islice(valid.tasks(), limit))
