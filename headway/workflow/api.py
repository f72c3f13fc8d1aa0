"""What a workflow is, and what it talks to: token ids go in, token ids with their evidence come out.

A workflow is one coroutine per sample: it asks the engine for tokens, asks for a reward, and returns what shall be
trained on. It never sees servers, weight updates or interruptions; `agenerate` goes on over all of them.
"""

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.config.rollout import GenerationHyperparameters
from headway.core.trajectory import StopReason, Trajectory

RewardFunction = Callable[..., Awaitable[float]]
"""`await reward_fn(prompt, completion, prompt_ids, completion_ids, /, **data)`: a row may have a `prompt` of its own.

Raises:
    RewardTimeout, RewardFailed: See `headway.workflow.errors`; they end the rollout under that name.
"""

EpisodeResult = Trajectory | Mapping[str, Any] | Sequence[Any] | None
"""A Trajectory, an AReaL-style dict of arrays, several of either, or None: rejected."""


class Tokenizer(Protocol):
    """What workflows need of a tokenizer; those of transformers have it."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any: ...


_PREFIX = secrets.token_hex(8)
_numbers = itertools.count()


def new_rid() -> str:
    """A request id. Its length is fixed: an engine that aborts by prefix can then only hit the one that is meant."""
    return f"{_PREFIX}{next(_numbers):016x}"


@dataclass(slots=True)
class ModelRequest:
    """One generation."""

    rid: str = field(default_factory=new_rid)
    """Names the request in logs and errors."""
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    """For people and traces; `affinity` (a string) overrides which requests are sent to one server."""
    tokenizer: Tokenizer | None = None
    """Needed only with stop strings: a stop string can straddle the point where a request was interrupted."""
    tool_call_stops: tuple[str | int, ...] = ()
    """Stop strings and ids, beside those of `gconfig`, that end a tool call: the stop reason is then `tool_calls`."""


@dataclass(slots=True)
class ModelResponse:
    """The tokens of one generation, each with its log-probability and the step of the policy that made it."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    """Includes the stop token, or the tokens of the stop string."""
    output_logprobs: list[float] = field(default_factory=list)
    """Of log-softmax(logits / temperature), before top-p, top-k and min-p."""
    output_versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = StopReason.STOP
    num_pieces: int = 1
    """Requests that it took; more than one after an interruption."""
    latency_s: float = 0.0
    server: str = ""
    """The server that made the last piece."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class InferenceEngine(Protocol):
    """Generates with the policy, wherever it is served."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate until a stop or the budget, over as many interruptions as happen.

        Raises:
            InvalidInput: The request cannot work: ids outside the vocabulary, no room in the context, bad parameters.
            ServerLost: No server could continue it.
            EvidenceInvalid: A reply contradicts itself.
            TimedOut: It took longer than `rollout.request_timeout`.
        """
        ...

    def get_version(self) -> int:
        """The step that new requests are generated with, at least."""
        ...


class RolloutWorkflow(ABC):
    """How one sample comes about. One instance serves all samples at the same time: keep no sample's state on it."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        """Roll out one sample of the dataset row `data`, which is this sample's own copy."""
