"""What answers a session's calls, and how large a session may become."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.config.rollout import GenerationHyperparameters
from headway.gateway.render import ChatRenderer
from headway.gateway.sampling import Rule
from headway.gateway.tool_calls import ToolParser, hermes
from headway.workflow.api import InferenceEngine, Tokenizer


@dataclass(frozen=True)
class Policy:
    """What answers a session's calls."""

    engine: InferenceEngine
    gconfig: GenerationHyperparameters
    tokenizer: Tokenizer
    renderer: ChatRenderer
    rule: Rule = Rule.EXPERIMENT
    parser: ToolParser = hermes
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, under those of a request."""


@dataclass(frozen=True)
class Limits:
    """How large a session may become."""

    max_turns: int = 256
    max_tokens: int = 1_000_000
