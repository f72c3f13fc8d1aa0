"""Decide which ready groups a train step consumes, and which of their tokens carry gradient.

A token made by version u is `step - u` stale when train step `step` consumes it. The deadline of a group is the last
step at which none of its tokens is older than eta: the oldest token's version plus eta. Groups are taken earliest
deadline first, in the order of submission where deadlines are equal.

| policy    | a group that holds a token older than eta                                                       |
|-----------|-------------------------------------------------------------------------------------------------|
| `mask`    | is used without those tokens; where no token is left, it is discarded                           |
| `discard` | is discarded                                                                                    |
| `wait`    | does not come to be: a step waits for running groups which no later step could take in time     |
| `allow`   | is used as it is                                                                                |

Guarantee (mask, discard, wait): no token older than eta carries gradient. `wait` needs a rollout's end to be waited
for; should a group be late all the same (eta was lowered for a resumed run), it is treated as by `mask`.

Why `wait` suffices: a batch is handed out only if for every deadline d the groups left behind with a deadline of at
most d fit into the steps after this one up to d, B each. The admission budget makes that true at the start, each
hand-out keeps it true.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

import numpy as np

from headway.core.trajectory import Group, Trajectory


class StalenessPolicy(StrEnum):
    """What happens to a group with a token older than eta."""

    MASK = "mask"
    DISCARD = "discard"
    WAIT = "wait"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready group, by what matters for its selection."""

    task_id: str
    order: int
    """Place in the order of submission."""
    oldest: int
    """Step of the version that made its oldest generated token."""
    newest: int
    """The same for its newest one."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a step takes, in order, and what is too old for it."""

    chosen: tuple[str, ...]
    stale: tuple[str, ...]
    num_missing: int = 0
    """Groups that the batch still lacks; 0: complete."""
    is_waiting_for_deadline: bool = False
    """Enough groups are ready, but running ones have to come first (`wait`)."""

    @property
    def is_complete(self) -> bool:
        return self.num_missing == 0 and not self.is_waiting_for_deadline


def select(
    ready: Iterable[Candidate],
    step: int,
    num_groups: int,
    eta: int,
    policy: StalenessPolicy,
    running: Sequence[int] = (),
) -> Selection:
    """Choose the groups of train step `step`.

    `running` holds, for each running rollout, the step that the fleet served when it started; only `wait` looks at it.
    The stale groups are to be discarded whether or not the batch is complete.

    Example:
        >>> old, new = Candidate("0/1", 1, oldest=4, newest=5), Candidate("0/0", 0, oldest=5, newest=5)
        >>> select([new, old], step=6, num_groups=1, eta=2, policy=StalenessPolicy.MASK).chosen
        ('0/1',)
    """
    ordered = sorted(ready, key=lambda candidate: (candidate.oldest, candidate.order))
    usable = [candidate for candidate in ordered if not is_too_old(candidate, step, eta, policy)]
    stale = tuple(candidate.task_id for candidate in ordered if is_too_old(candidate, step, eta, policy))
    chosen, left = usable[:num_groups], usable[num_groups:]
    has_to_wait = policy is StalenessPolicy.WAIT and _should_wait(
        _slacks((candidate.oldest for candidate in chosen), step, eta),
        _slacks((candidate.oldest for candidate in left), step, eta),
        _slacks(running, step, eta),
        num_groups,
    )
    names = tuple(candidate.task_id for candidate in chosen)
    return Selection(names, stale, num_groups - len(chosen), has_to_wait)


def is_too_old(candidate: Candidate, step: int, eta: int, policy: StalenessPolicy) -> bool:
    """Whether no part of the group may be used at `step`."""
    match policy:
        case StalenessPolicy.ALLOW:
            return False
        case StalenessPolicy.DISCARD:
            return step - candidate.oldest > eta
        case StalenessPolicy.MASK | StalenessPolicy.WAIT:
            return step - candidate.newest > eta


def can_be_in_time(started_at: int, next_step: int, eta: int) -> bool:
    """Whether a rollout whose first token was made by version `started_at` can still be used whole at `next_step`."""
    return next_step - started_at <= eta


def _slacks(oldest: Iterable[int], step: int, eta: int) -> list[int]:
    """How many groups have at most 0, 1, ... eta steps to spare after `step`; late ones do not count."""
    counts = Counter(min(version, step) + eta - step for version in oldest)
    return list(accumulate(counts.get(slack, 0) for slack in range(eta + 1)))


def _should_wait(chosen: list[int], left: list[int], running: list[int], num_groups: int) -> bool:
    """Whether a running group must come before one of the chosen, lest a group left behind finds no step in time.

    Where the chosen are all as urgent as the running ones, waiting helps nobody.
    """
    return any(
        left[slack] + running[slack] > slack * num_groups and running[slack] and chosen[slack] < chosen[-1]
        for slack in range(len(left) - 1)
    )


def mask_stale(group: Group, step: int, eta: int) -> tuple[Group, int]:
    """Take the gradient from every token older than eta.

    Returns the group (the same one where nothing changes) and the number of tokens that lost their gradient.
    """
    masked = [_mask_trajectory(trajectory, step, eta) for trajectory in group.trajectories]
    num_masked = sum(count for _, count in masked)
    if num_masked == 0:
        return group, 0
    return replace(group, trajectories=tuple(trajectory for trajectory, _ in masked)), num_masked


def _mask_trajectory(trajectory: Trajectory, step: int, eta: int) -> tuple[Trajectory, int]:
    loses = trajectory.loss_mask & (step - trajectory.versions > eta)
    count = int(np.count_nonzero(loses))
    return (replace(trajectory, loss_mask=trajectory.loss_mask & ~loses), count) if count else (trajectory, 0)
