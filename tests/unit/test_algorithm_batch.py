"""A batch holds each group's samples as they came, and nothing that is not a finite number."""

import math

import numpy as np
import pytest
import torch

from headway.algorithm.batch import SampleBatch
from headway.core.trajectory import Group, StopReason, Trajectory


def trajectory(length: int, reward: float = 1.0, logp: float = -1.0, start: int = 10) -> Trajectory:
    generated = np.arange(length) >= 2
    return Trajectory(
        input_ids=np.arange(start, start + length, dtype=np.int32),
        logprobs=np.where(generated, logp, 0.0).astype(np.float32),
        loss_mask=generated,
        versions=np.where(generated, 4, -1).astype(np.int32),
        reward=reward,
        stop_reason=StopReason.LENGTH if reward < 0 else StopReason.STOP,
    )


def test_samples_lie_end_to_end_and_know_their_group() -> None:
    groups = [Group("0/7", (trajectory(3), trajectory(4, -1.0))), Group("0/9", (trajectory(2, start=50),))]
    batch = SampleBatch.from_groups(groups)
    assert batch.lengths.tolist() == [3, 4, 2]
    assert batch.starts.tolist() == [0, 3, 7]
    assert batch.input_ids.tolist() == [10, 11, 12, 10, 11, 12, 13, 50, 51]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, True, True, False, False]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.task_ids == ("0/7", "0/9")
    assert batch.no_eos.tolist() == [False, True, False]
    assert batch.sample_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_the_first_token_never_carries_gradient() -> None:
    everything = Trajectory(
        np.array([1, 2], np.int32),
        np.array([-1, -1], np.float32),
        np.array([True, True]),
        np.array([0, 0], np.int32),
        1.0,
    )
    assert SampleBatch.from_groups([Group("0/0", (everything,))]).loss_mask.tolist() == [False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_evidence_that_is_not_finite_never_carries_gradient(bad: float) -> None:
    broken_logp, broken_reward, good = trajectory(5), trajectory(4, reward=bad), trajectory(4)
    broken_logp.logprobs[3] = bad
    batch = SampleBatch.from_groups([Group("0/0", (broken_logp, broken_reward, good))])
    assert batch.loss_mask.tolist() == [False, False, True, False, True] + [False] * 4 + [False, False, True, True]
    assert batch.num_invalid_tokens == 3
    assert all(bool(value.isfinite().all()) for _, value in batch.tensors())


def test_selected_samples_keep_their_tokens_and_groups() -> None:
    groups = [Group(f"0/{i}", (trajectory(2 + i, start=10 * i),)) for i in range(4)]
    batch = SampleBatch.from_groups(groups)
    batch = batch.with_(advantages=torch.arange(batch.num_tokens, dtype=torch.float32))
    chosen = batch.select([3, 1])
    assert chosen.lengths.tolist() == [5, 3]
    assert chosen.input_ids.tolist() == [30, 31, 32, 33, 34, 10, 11, 12]
    assert chosen.group_ids.tolist() == [3, 1]
    assert chosen.advantages is not None
    assert chosen.advantages.tolist() == [9, 10, 11, 12, 13, 2, 3, 4]


def test_contradicting_lengths_are_refused() -> None:
    short = Trajectory(
        np.array([1, 2], np.int32), np.array([0], np.float32), np.array([False, True]), np.array([-1, 0], np.int32), 1.0
    )
    with pytest.raises(ValueError, match="2 tokens has 1 logprobs"):
        SampleBatch.from_groups([Group("0/0", (short,))])
    with pytest.raises(ValueError, match="at least one sample"):
        SampleBatch.from_groups([])
