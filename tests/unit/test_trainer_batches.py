"""No token older than eta carries gradient, whatever the controller hands out; what may not be trained on is named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.trajectory import Group
from headway.errors import InvalidInput
from headway.testing.scripted_controller import random_group
from services.trainer.batches import check_lengths, check_versions
from services.trainer.statistics import token_staleness


def with_versions(group: Group, change: object) -> Group:
    samples = [dataclasses.replace(s, versions=np.where(s.loss_mask, change, s.versions)) for s in group.trajectories]
    return Group(group.task_id, tuple(samples))


@given(version=st.integers(-1, 8), step=st.integers(0, 8), eta=st.integers(0, 4))
def test_a_batch_is_taken_exactly_when_every_gradient_carrying_token_is_within_eta(
    version: int, step: int, eta: int
) -> None:
    group = with_versions(random_group("0/1", 0), version)
    if 0 <= version <= step and step - version <= eta:
        check_versions([group], step, eta)
        assert token_staleness([group], step).max() == step - version
    else:
        with pytest.raises(InvalidInput, match="task 0/1"):
            check_versions([group], step, eta)


def test_tokens_without_gradient_may_be_of_any_age() -> None:
    group = random_group("0/1", 0)
    masked = [dataclasses.replace(sample, loss_mask=np.zeros(len(sample), bool)) for sample in group.trajectories]
    check_versions([Group("0/1", tuple(masked))], step=9, eta=0)


def test_one_old_token_among_many_is_found() -> None:
    group = random_group("0/7", 5)
    group.trajectories[2].versions[-1] = 2
    check_versions([group], step=5, eta=3)
    with pytest.raises(InvalidInput, match="step 5, task 0/7: a token that carries gradient is 3 versions old"):
        check_versions([group], step=5, eta=2)


def test_the_policy_allow_still_refuses_tokens_from_the_future() -> None:
    check_versions([random_group("0/1", 0)], step=9, eta=None)
    with pytest.raises(InvalidInput, match="does not exist yet"):
        check_versions([random_group("0/1", 10)], step=9, eta=None)


def test_a_sample_longer_than_the_token_budget_names_its_task() -> None:
    groups = [random_group("0/1", 0, max_new_tokens=2), random_group("0/2", 0, max_new_tokens=40)]
    longest = max(len(sample) for sample in groups[1].trajectories)
    check_lengths(groups, longest)
    with pytest.raises(InvalidInput, match=f"task 0/2 has {longest} tokens"):
        check_lengths(groups, longest - 1)
