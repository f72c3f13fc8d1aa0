"""The samples of one task: rolled out together, each with its own copy of the row, whole or not at all."""

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from headway.core.trajectory import Trajectory
from headway.workflow.api import InferenceEngine, RolloutWorkflow, new_rid
from headway.workflow.convert import ARRAYS, as_trajectories
from headway.workflow.form import check_form

current_group: ContextVar[str] = ContextVar("current_group", default="")
"""Names the group that the running coroutine belongs to: its samples and turns share a prefix, and so best a server."""

AcceptFunction = Callable[[Mapping[str, Any]], Any]
"""Says of a group, seen as a `GroupView`, whether it may be trained on."""


async def run_group(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    data: Mapping[str, Any],
    num_samples: int,
    is_checked: bool = False,
) -> tuple[Trajectory, ...] | None:
    """Roll out `num_samples` samples of a row at the same time; None when the workflow rejected one of them.

    The first failure cancels the other samples and is raised as it is: a group is consumed whole or not at all. With
    `is_checked`, a result whose form is at fault is such a failure even where it could be converted.
    """
    current_group.set(new_rid())
    if num_samples == 1:
        return _whole([await _sample(workflow, engine, data, is_checked)])
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_sample(workflow, engine, data, is_checked)) for _ in range(num_samples)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return _whole([task.result() for task in running])


async def _sample(
    workflow: RolloutWorkflow, engine: InferenceEngine, data: Mapping[str, Any], is_checked: bool
) -> list[Trajectory]:
    result = await workflow.arun_episode(engine, copy.deepcopy(dict(data)))
    if is_checked:
        check_form(result)
    return as_trajectories(result)


def _whole(samples: Sequence[Sequence[Trajectory]]) -> tuple[Trajectory, ...] | None:
    if not all(samples):
        return None
    return tuple(trajectory for sample in samples for trajectory in sample)


class GroupView(Mapping[str, Any]):
    """A group as AReaL's `should_accept_fn` expects it: `rewards` [n], and the padded arrays [n, L].

    Example:
        >>> accept = lambda group: 0 < group["rewards"].mean() < 1
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._trajectories = trajectories

    def __getitem__(self, name: str) -> Any:
        if name == "rewards":
            return np.array([trajectory.reward for trajectory in self._trajectories], np.float32)
        if name == "attention_mask":
            return self._padded([np.ones(len(trajectory), np.bool_) for trajectory in self._trajectories])
        if name not in ARRAYS:
            raise KeyError(name)
        return self._padded([getattr(trajectory, name) for trajectory in self._trajectories])

    def __iter__(self) -> Iterator[str]:
        return iter((*ARRAYS, "rewards", "attention_mask"))

    def __len__(self) -> int:
        return len(ARRAYS) + 2

    @staticmethod
    def _padded(rows: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        padded = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = row
        return padded


def rewards_differ(group: Mapping[str, Any]) -> bool:
    """Accept groups that give a gradient: not all rewards are equal (dynamic sampling, arXiv:2503.14476)."""
    rewards = group["rewards"]
    return bool(rewards.max() > rewards.min())
