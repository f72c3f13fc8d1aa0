"""What a step consumes: earliest deadline first, nothing too old, and with `wait` nothing ever gets too old."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.selection import Candidate, StalenessPolicy, can_be_in_time, mask_stale, select
from headway.core.trajectory import NO_VERSION, Group, Trajectory

MASK, DISCARD, WAIT, ALLOW = StalenessPolicy
candidates = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
).flatmap(lambda spans: st.permutations([Candidate(f"0/{row}", row, *span) for row, span in enumerate(spans)]))


def trajectory(versions: list[int]) -> Trajectory:
    """`NO_VERSION` marks prompt tokens."""
    array = np.array(versions, np.int32)
    return Trajectory(np.zeros_like(array), np.zeros(len(array), np.float32), array != NO_VERSION, array, 1.0)


def gradient_versions(group: Group) -> list[int]:
    """Of all tokens that carry gradient."""
    return sorted(int(version) for one in group.trajectories for version in one.versions[one.loss_mask])


@given(candidates, st.integers(0, 12), st.integers(1, 6), st.integers(0, 4), st.sampled_from(StalenessPolicy))
def test_the_earliest_deadlines_are_taken_in_the_order_of_submission(
    ready: list[Candidate], step: int, num_groups: int, eta: int, policy: StalenessPolicy
) -> None:
    selection = select(ready, step, num_groups, eta, policy)
    by_name = {candidate.task_id: candidate for candidate in ready}
    keys = [(by_name[name].oldest, by_name[name].order) for name in selection.chosen]
    left = [by_name[name] for name in by_name.keys() - {*selection.chosen, *selection.stale}]
    assert keys == sorted(keys)
    assert all((candidate.oldest, candidate.order) > keys[-1] for candidate in left)
    assert len(selection.chosen) == min(num_groups, len(ready) - len(selection.stale))
    assert selection.num_missing == num_groups - len(selection.chosen)


@given(candidates, st.integers(0, 12), st.integers(0, 4))
def test_what_is_discarded_is_what_the_policy_cannot_use(ready: list[Candidate], step: int, eta: int) -> None:
    stale = {policy: set(select(ready, step, 1, eta, policy).stale) for policy in StalenessPolicy}
    assert stale[ALLOW] == set()
    assert stale[DISCARD] == {candidate.task_id for candidate in ready if step - candidate.oldest > eta}
    assert stale[MASK] == stale[WAIT] == {candidate.task_id for candidate in ready if step - candidate.newest > eta}


@given(candidates, st.integers(0, 12), st.integers(1, 6), st.integers(0, 4), st.lists(st.integers(0, 9), max_size=6))
def test_waiting_is_never_for_nothing(
    ready: list[Candidate], step: int, num_groups: int, eta: int, running: list[int]
) -> None:
    """Only a running group that is more urgent than one of the chosen is waited for."""
    selection = select(ready, step, num_groups, eta, WAIT, running)
    if selection.is_waiting_for_deadline:
        chosen = [candidate.oldest for candidate in ready if candidate.task_id in selection.chosen]
        assert any(step - eta <= started < max(chosen) for started in running)
    assert not select(ready, step, num_groups, eta, MASK, running).is_waiting_for_deadline


@settings(max_examples=150)
@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_with_wait_no_group_ever_gets_too_old(batch: int, eta: int, data: st.DataObject) -> None:
    """Rollouts start while the budget allows and end in any order; steps follow each other."""
    limit, row = (eta + 1) * batch, 0
    running: list[Candidate] = []
    ready: list[Candidate] = []
    for step in range(8):
        while True:
            while len(running) + len(ready) < limit:
                running.append(Candidate(f"0/{row}", row, step, step))
                row += 1
            selection = select(ready, step, batch, eta, WAIT, [candidate.oldest for candidate in running])
            assert selection.stale == ()
            if selection.is_complete:
                break
            ready.append(running.pop(data.draw(st.integers(0, len(running) - 1))))
        assert all(step - candidate.oldest <= eta for candidate in ready)
        ready = [candidate for candidate in ready if candidate.task_id not in selection.chosen]


@given(
    st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(0, 10),
    st.integers(0, 4),
)
def test_after_masking_no_token_older_than_eta_carries_gradient(rows: list[list[int]], step: int, eta: int) -> None:
    group = Group("0/0", tuple(map(trajectory, rows)))
    masked, num_masked = mask_stale(group, step, eta)
    flat = [version for row in rows for version in row if version != NO_VERSION]
    assert num_masked == sum(step - version > eta for version in flat)
    assert gradient_versions(masked) == sorted(version for version in flat if step - version <= eta)
    for before, after in zip(group.trajectories, masked.trajectories, strict=True):
        assert after.versions is before.versions
        assert after.input_ids is before.input_ids


def test_a_group_without_old_tokens_is_not_touched() -> None:
    group = Group("0/0", (trajectory([-1, 3, 4]),))
    assert mask_stale(group, step=5, eta=2) == (group, 0)


@pytest.mark.parametrize(("started", "step", "in_time"), [(3, 5, True), (3, 6, False), (0, 0, True)])
def test_a_rollout_is_late_when_its_first_token_is_older_than_eta(started: int, step: int, in_time: bool) -> None:
    assert can_be_in_time(started, step, eta=2) is in_time
