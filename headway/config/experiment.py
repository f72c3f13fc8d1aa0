"""The experiment file as a whole: its sections, what is filled in between them, and what follows from it.

Keys are AReaL's, and ours beside them. A value that one section leaves out and another one knows is filled in before
validation (`FILLED`), so readers never need to look in two places.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import PositiveInt, model_validator

from headway.config.actor import ActorConfig, RefConfig, WarmStartConfig
from headway.config.allocation import Allocation, parse_inference, parse_training
from headway.config.cluster import ClusterConfig, SchedulerConfig, ServicesConfig
from headway.config.dataset import EvaluatorConfig, RecoverConfig, SaverConfig, TrainDatasetConfig, ValidDatasetConfig
from headway.config.engines import SGLangConfig, VLLMConfig
from headway.config.observe import PerfTracerConfig, StatsLoggerConfig
from headway.config.paths import RunPaths, user_name
from headway.config.rollout import (
    GenerationHyperparameters,
    InferenceConfig,
    RewardConfig,
    RolloutConfig,
    WorkflowConfig,
)
from headway.config.section import NullMeans, Section

FILLED: tuple[tuple[str, str], ...] = (
    ("train_dataset.batch_size", "rollout.consumer_batch_size"),
    ("rollout.consumer_batch_size", "train_dataset.batch_size"),
    ("tokenizer_path", "actor.path"),
    ("rollout.tokenizer_path", "tokenizer_path"),
    ("actor.temperature", "gconfig.temperature"),
    ("actor.max_new_tokens", "gconfig.max_new_tokens"),
    ("actor.reward_norm.group_size", "gconfig.n_samples"),
    ("actor.adv_norm.group_size", "gconfig.n_samples"),
    ("ref.path", "actor.path"),
)
"""(key, the key whose value it takes where it is left out or null), in the order of filling."""


class ExperimentConfig(Section):
    """One experiment."""

    experiment_name: str = "experiment"
    """First half of the run's name and of all its paths."""
    trial_name: str = "trial0"
    """Second half of the run's name and of all its paths."""
    seed: int = 1
    """Seed of the dataset's order, of sampling, of torch."""
    enable_offload: bool = False
    """Parameters and optimizer state wait on the CPU between the trainer's phases."""
    total_train_epochs: PositiveInt = 1
    """Epochs over `train_dataset`. The earliest of the three limits ends training."""
    total_train_steps: PositiveInt | None = None
    """Train steps; null: no such limit."""
    total_train_n_seqs: PositiveInt | None = None
    """Sequences trained on; null: no such limit."""
    tokenizer_path: Annotated[str, NullMeans("actor.path")] = ""
    """Tokenizer of dataset, workflows and dumps."""
    allocation_mode: Annotated[str, NullMeans("sglang:d1+d1")] = "sglang:d1+d1"
    """Engines and devices: `sglang:d4t1+d4` is four SGLang servers and a trainer of four ranks."""
    cluster: ClusterConfig = ClusterConfig()
    """Machines, folders, name-resolve."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Who places the processes."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout controller."""
    gconfig: GenerationHyperparameters = GenerationHyperparameters()
    """Sampling parameters of training."""
    eval_gconfig: GenerationHyperparameters | None = None
    """Sampling parameters of evaluation; null: those of `gconfig`, with `evaluator.num_samples` samples."""
    actor: ActorConfig = ActorConfig()
    """The policy."""
    ref: RefConfig | None = None
    """The frozen model of the KL penalty; built only where `actor.kl_ctl` is above 0."""
    sglang: SGLangConfig = SGLangConfig()
    """Flags of SGLang."""
    vllm: VLLMConfig = VLLMConfig()
    """Flags of vLLM."""
    inference: InferenceConfig = InferenceConfig()
    """The inference services."""
    reward: RewardConfig = RewardConfig()
    """The reward service."""
    workflow: WorkflowConfig = WorkflowConfig()
    """What happens in one episode."""
    warm_start: WarmStartConfig | None = None
    """A short supervised phase before the first step; null: none."""
    train_dataset: TrainDatasetConfig = TrainDatasetConfig()
    """The rows to train on."""
    valid_dataset: ValidDatasetConfig | None = None
    """The rows to evaluate on; null: no evaluation."""
    saver: SaverConfig = SaverConfig()
    """Export of the model."""
    recover: RecoverConfig = RecoverConfig()
    """Checkpoints from which a run continues."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """When `valid_dataset` is evaluated."""
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()
    """Where statistics go."""
    perf_tracer: PerfTracerConfig = PerfTracerConfig()
    """Traces."""
    services: ServicesConfig = ServicesConfig()
    """Addresses of the services."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        return filled_in(data) if isinstance(data, Mapping) else data

    @property
    def run_name(self) -> str:
        """`experiment/trial`: below it lie all names of the run in name-resolve."""
        return f"{self.experiment_name}/{self.trial_name}"

    @cached_property
    def allocation(self) -> Allocation:
        """Engines and devices, whichever spelling the file uses.

        Raises:
            AllocationError: It cannot be read. A loaded file has been checked.
        """
        if self.rollout.backend is None and self.actor.backend is None:
            return Allocation.parse(self.allocation_mode)
        engine, inference = parse_inference(self.rollout.backend or "sglang:d1")
        strategies = (self.rollout.scheduling_strategy.type, self.actor.scheduling_strategy.type)
        is_colocated = "colocation" in strategies
        return Allocation(engine, inference, parse_training(self.actor.backend or "d1"), is_colocated)

    @property
    def engine(self) -> str:
        """What the inference services run: `builtin`, `sglang` or `vllm`."""
        return self.inference.engine or self.allocation.engine

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        """Sampling parameters of evaluation."""
        return self.eval_gconfig or self.gconfig.new(n_samples=self.evaluator.num_samples, greedy=False)

    @cached_property
    def paths(self) -> RunPaths:
        """Where this run's files are."""

        def at(kind: str, fileroot: str | None = None) -> Path:
            root = Path(fileroot or self.cluster.fileroot).expanduser().absolute()
            return root / kind / user_name() / self.experiment_name / self.trial_name

        return RunPaths(
            run=at("run"),
            logs=at("logs", self.stats_logger.fileroot),
            weights=at("weights"),
            checkpoints=at("checkpoints", self.saver.fileroot),
            recover=at("recover", self.recover.fileroot),
            rollouts=at("rollout", self.rollout.fileroot),
            eval_rollouts=at("eval-rollout", self.evaluator.fileroot),
            journal=at("journal"),
            traces=at("traces", self.perf_tracer.fileroot),
        )


def filled_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every key of `FILLED` that is left out has the value of its neighbour, where that one has one."""
    filled: dict[str, Any] = _copied(data)
    for key, source in FILLED:
        section, name = _section_of(filled, key)
        value_in, value_name = _section_of(filled, source)
        if section is None or value_in is None or section.get(name) not in (None, ""):
            continue
        if (value := value_in.get(value_name)) is not None:
            section[name] = value
    _fill_record_root(filled)
    return filled


def _fill_record_root(data: dict[str, Any]) -> None:
    """`{cluster.fileroot}/name_resolve`, where the file has no folder for the names."""
    cluster, _ = _section_of(data, "cluster.name_resolve")
    if cluster is None:
        return
    names = cluster.get("name_resolve") or {}
    root = cluster.get("fileroot") or ClusterConfig.model_fields["fileroot"].default
    if isinstance(names, dict) and not names.get("nfs_record_root"):
        cluster["name_resolve"] = {**names, "nfs_record_root": f"{root}/name_resolve"}


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _section_of(data: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """The mapping that holds a dotted key, and the key's last part. Sections that always exist are made on the way."""
    *parents, name = key.split(".")
    here: Any = data
    for depth, parent in enumerate(parents):
        if depth == 0 and here.get(parent) is None and ExperimentConfig.null_is_default(parent):
            here[parent] = {}
        here = here.get(parent)
        if not isinstance(here, dict):
            return None, name
    return here, name
