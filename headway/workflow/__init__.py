"""What users write and import: workflows, and the engine that they talk to."""

from headway.config.rollout import GenerationHyperparameters
from headway.workflow.api import (
    EpisodeResult,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RewardFunction,
    RolloutWorkflow,
    Tokenizer,
)
from headway.workflow.conversation import Conversation
from headway.workflow.convert import as_trajectories
from headway.workflow.group import GroupView, rewards_differ, run_group
from headway.workflow.load import load_filter, load_object, load_workflow
from headway.workflow.multi_turn import MultiTurnWorkflow
from headway.workflow.rlvr import RLVRWorkflow
from headway.workflow.sequence import TokenSequence

__all__ = [
    "Conversation",
    "EpisodeResult",
    "GenerationHyperparameters",
    "GroupView",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "MultiTurnWorkflow",
    "RLVRWorkflow",
    "RewardFunction",
    "RolloutWorkflow",
    "TokenSequence",
    "Tokenizer",
    "as_trajectories",
    "load_filter",
    "load_object",
    "load_workflow",
    "rewards_differ",
    "run_group",
]
