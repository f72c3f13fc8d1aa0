"""The experiment file: typed, strict, importable without torch.

from headway.config import load_experiment
config = load_experiment("configs/gsm8k_grpo.yaml", ["actor.path=models/tiny"])
"""

from headway.config.actor import (
    ActorConfig,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    RefConfig,
    RejectionSamplingConfig,
    WarmStartConfig,
)
from headway.config.allocation import Allocation, AllocationError, Dims
from headway.config.cluster import ClusterConfig, NameResolveConfig, SchedulingSpec, ServicesConfig
from headway.config.dataset import (
    DatasetConfig,
    EvaluatorConfig,
    Frequency,
    RecoverConfig,
    SaverConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from headway.config.engines import SGLangConfig, VLLMConfig
from headway.config.experiment import ExperimentConfig
from headway.config.loading import Experiment, load_experiment, read_experiment, require_runnable
from headway.config.observe import PerfTracerConfig, StatsLoggerConfig
from headway.config.paths import RunPaths
from headway.config.rollout import (
    GenerationHyperparameters,
    InferenceConfig,
    RewardConfig,
    RolloutConfig,
    WorkflowConfig,
)
from headway.config.show import plain, save_resolved

__all__ = [
    "ActorConfig",
    "Allocation",
    "AllocationError",
    "ClusterConfig",
    "DatasetConfig",
    "Dims",
    "EvaluatorConfig",
    "Experiment",
    "ExperimentConfig",
    "Frequency",
    "GenerationHyperparameters",
    "InferenceConfig",
    "MicroBatchSpec",
    "NameResolveConfig",
    "NormConfig",
    "OptimizerConfig",
    "PerfTracerConfig",
    "RecoverConfig",
    "RefConfig",
    "RejectionSamplingConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunPaths",
    "SGLangConfig",
    "SaverConfig",
    "SchedulingSpec",
    "ServicesConfig",
    "StatsLoggerConfig",
    "TrainDatasetConfig",
    "VLLMConfig",
    "ValidDatasetConfig",
    "WarmStartConfig",
    "WorkflowConfig",
    "load_experiment",
    "plain",
    "read_experiment",
    "require_runnable",
    "save_resolved",
]
