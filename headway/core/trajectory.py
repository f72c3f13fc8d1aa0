"""What a rollout leaves behind: samples, groups of samples, and the one reason in which each rollout ends."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

NO_VERSION = -1
"""Version of a token that no policy generated: prompts, tool output."""


class StopReason(StrEnum):
    """How a sample's generation ended."""

    STOP = "stop"
    """An end-of-sequence token, stop token or stop string."""
    LENGTH = "length"
    """The token budget or the context was used up."""
    TOOL_CALLS = "tool_calls"
    """The model asked for a tool."""
    ABORT = "abort"
    """Interrupted and never continued."""


class Outcome(StrEnum):
    """The one reason in which every rollout ends."""

    ACCEPTED = "accepted"
    """Complete, scored, passed the filter: ready to be trained on."""
    REJECTED = "rejected"
    """The workflow returned nothing, or the acceptance filter said no."""
    STALE = "stale"
    """Too old to be trained on when its turn came."""
    REWARD_TIMEOUT = "reward_timeout"
    """A reward call ran past its limit."""
    REWARD_ERROR = "reward_error"
    """A reward call failed."""
    WORKFLOW_ERROR = "workflow_error"
    """The workflow raised."""
    SERVER_LOST = "server_lost"
    """No server could continue a request."""
    EVIDENCE_INVALID = "evidence_invalid"
    """A reply's lengths, log-probs or versions contradict each other."""
    CANCELLED = "cancelled"
    """Withdrawn: shutdown, or can no longer be in time."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One token sequence of length L, prompt and completion, as it will be trained on."""

    input_ids: NDArray[np.int32]
    """[L] token ids."""
    logprobs: NDArray[np.float32]
    """[L] log-probability of each generated token under the policy that made it; 0 elsewhere."""
    loss_mask: NDArray[np.bool_]
    """[L] true where the token was generated and carries gradient."""
    versions: NDArray[np.int32]
    """[L] step of the version that generated each token; NO_VERSION elsewhere."""
    reward: float
    stop_reason: StopReason = StopReason.STOP
    metrics: dict[str, float] = field(default_factory=dict)
    """Named numbers of this sample, aggregated by mean."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task. Consumed whole or not at all."""

    task_id: str
    trajectories: tuple[Trajectory, ...]
    attempt: int = 1
    rollout_s: float = 0.0
