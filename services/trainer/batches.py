"""The batches of the steps: the next one is fetched and laid out while weights are written, and each is checked again.

Guarantee (I3): a batch that holds a gradient-carrying token older than eta, from the future, or without a version is
refused here, whatever the controller did. Proved in test_trainer_batches.py.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.algorithm.batch import SampleBatch
from headway.config import ExperimentConfig
from headway.core.trajectory import Group
from headway.errors import InvalidInput, NotFound
from services.trainer.controller_client import FetchedBatch

log = logging.getLogger(__name__)


class Fetcher(Protocol):
    """The part of the controller's client that gives batches."""

    async def fetch_batch(self, step: int, num_groups: int) -> FetchedBatch:
        """The batch of a step; waits until it is complete."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A batch as it came, and as it is trained on."""

    fetched: FetchedBatch
    samples: SampleBatch

    @property
    def task_ids(self) -> list[str]:
        return [group.task_id for group in self.fetched.groups]


class HistoryLost(NotFound):
    """The controller no longer has the batches that are to be trained on again."""


class BatchSource:
    """Fetches ahead.

    Args:
        config: Batch size, eta, policy, and the token budget of a micro-batch.
        controller: Gives the batches.
        replay_until: Batches of earlier steps were handed out in an earlier life of the run.
    """

    def __init__(self, config: ExperimentConfig, controller: Fetcher, replay_until: int) -> None:
        self._config = config
        self._controller = controller
        self.replay_until = replay_until
        self._tasks: dict[int, asyncio.Task[StepBatch]] = {}

    def prefetch(self, step: int) -> "asyncio.Task[StepBatch]":
        """Begin to fetch the batch of `step`, if that has not begun."""
        if step not in self._tasks:
            self._tasks[step] = asyncio.create_task(self._fetch(step), name=f"batch of step {step}")
        return self._tasks[step]

    def forget(self, step: int) -> None:
        """The batch of `step` has been consumed, or the step begins anew."""
        task = self._tasks.pop(step, None)
        if task is not None:
            task.cancel()

    def forget_all(self) -> None:
        """Let go of every batch."""
        for step in list(self._tasks):
            self.forget(step)

    def has(self, step: int) -> bool:
        """Whether the batch of `step` has arrived."""
        return step in self._tasks and self._tasks[step].done()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, step: int) -> StepBatch:
        fetched = await self._controller.fetch_batch(step, self._config.rollout.consumer_batch_size)
        if step < self.replay_until and not fetched.is_replay:
            raise HistoryLost(f"the batch of step {step} was trained on before, and the controller has lost it")
        return await asyncio.to_thread(checked_batch, self._config, fetched)


def checked_batch(config: ExperimentConfig, fetched: FetchedBatch) -> StepBatch:
    """Lay a batch out, after it was checked.

    Raises:
        InvalidInput: It may not be trained on; the message names the task.
    """
    expected = config.rollout.consumer_batch_size
    if len(fetched.groups) != expected:
        raise InvalidInput(f"the batch of step {fetched.step} has {len(fetched.groups)} groups, not {expected}")
    eta = None if config.rollout.staleness_policy == "allow" else fetched.eta
    check_versions(fetched.groups, fetched.step, eta)
    check_lengths(fetched.groups, config.actor.mb_spec.max_tokens_per_mb)
    return StepBatch(fetched, SampleBatch.from_groups(fetched.groups))


def check_versions(groups: Sequence[Group], step: int, eta: int | None) -> None:
    """Refuse gradient from tokens that step `step` may not train on.

    Args:
        eta: Largest staleness in versions; None: no limit.

    Raises:
        InvalidInput: A gradient-carrying token is too old, of a later version, or of none.
    """
    for group in groups:
        for sample in group.trajectories:
            versions = sample.versions[sample.loss_mask]
            if not len(versions):
                continue
            oldest, newest = int(np.min(versions)), int(np.max(versions))
            where = f"step {step}, task {group.task_id}: a token that carries gradient"
            if oldest < 0:
                raise InvalidInput(f"{where} has no version")
            if newest > step:
                raise InvalidInput(f"{where} was made by version {newest}, which does not exist yet")
            if eta is not None and step - oldest > eta:
                raise InvalidInput(f"{where} is {step - oldest} versions old; max_head_offpolicyness is {eta}")


def check_lengths(groups: Sequence[Group], max_tokens: int | None) -> None:
    """Refuse samples that fit into no micro-batch.

    Raises:
        InvalidInput: Names the longest one's task.
    """
    if max_tokens is None:
        return
    length, task_id = max((len(sample), group.task_id) for group in groups for sample in group.trajectories)
    if length > max_tokens:
        raise InvalidInput(
            f"a sample of task {task_id} has {length} tokens, more than actor.mb_spec.max_tokens_per_mb ({max_tokens})"
        )
