"""The workflows of the experiment file: one for training, one for evaluation, made as soon as there is a tokenizer.

The tokenizer comes from `rollout.tokenizer_path` where that is a folder on this machine (mistakes in the file then
show before the service is ready), else from the folder of the first published version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headway.config import ExperimentConfig
from headway.errors import InvalidInput
from headway.gateway.gateway import Gateway
from headway.gateway.policy import Policy
from headway.gateway.render import ChatRenderer
from headway.gateway.sampling import Rule
from headway.workflow.api import EpisodeResult, InferenceEngine, RewardFunction, RolloutWorkflow, Tokenizer
from headway.workflow.load import load_workflow

log = logging.getLogger(__name__)


class DeferredWorkflow(RolloutWorkflow):
    """Stands in for a workflow that is not made yet; its episodes wait until it is."""

    def __init__(self) -> None:
        self._made: asyncio.Future[RolloutWorkflow] = asyncio.get_running_loop().create_future()

    def become(self, workflow: RolloutWorkflow) -> None:
        """From now on be `workflow`."""
        self._made.set_result(workflow)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        workflow = self._made.result() if self._made.done() else await asyncio.shield(self._made)
        return await workflow.arun_episode(engine, data)


@dataclass
class Workflows:
    """The workflows of a run.

    Args:
        config: The experiment file.
        reward_fn: Scores completions.
        engine: Generates for agents that belong to no task.
    """

    config: ExperimentConfig
    reward_fn: RewardFunction
    engine: InferenceEngine

    def __post_init__(self) -> None:
        self.gateway = Gateway(lambda: self._outside)
        self._outside: Policy | None = None
        self.tokenizer_folder: Path | None = None
        """Known as soon as the workflows are made."""
        self.training = DeferredWorkflow()
        self.evaluation = DeferredWorkflow()

    @property
    def has_local_tokenizer(self) -> bool:
        return self._local_folder.is_dir()

    @property
    def _local_folder(self) -> Path:
        return Path(self.config.rollout.tokenizer_path).expanduser()

    async def make(self, first_version: Callable[[], Awaitable[Path]]) -> None:
        """Make both.

        Args:
            first_version: Waits for the folder of the first published version.

        Raises:
            InvalidInput: The workflow or the tokenizer cannot be loaded.
        """
        folder = self._local_folder if self.has_local_tokenizer else await first_version()
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        self.tokenizer_folder = folder
        gconfig, renderer = self.config.gconfig, ChatRenderer(tokenizer)
        self._outside = Policy(self.engine, gconfig, tokenizer, renderer, Rule.CLIENT)
        self.training.become(self._load(tokenizer, is_training=True))
        self.evaluation.become(self._load(tokenizer, is_training=False))
        log.info("workflow %s, tokenizer from %s", self.config.workflow.path, folder)

    def load_tokenizer(self) -> Tokenizer:
        """Another copy of the workflows' tokenizer, for another thread; only once they are made."""
        assert self.tokenizer_folder is not None
        return load_tokenizer(self.tokenizer_folder)

    def _load(self, tokenizer: Tokenizer, is_training: bool) -> RolloutWorkflow:
        return load_workflow(
            self.config.workflow.path,
            self.config.workflow.kwargs,
            reward_fn=self.reward_fn,
            gconfig=self.config.gconfig if is_training else self.config.evaluation_gconfig,
            tokenizer=tokenizer,
            gateway=self.gateway,
        )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a model's folder.

    Raises:
        InvalidInput: There is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"no tokenizer can be loaded from {folder} (tokenizer_path): {error}") from error
