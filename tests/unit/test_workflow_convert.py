"""Every known form of a result becomes the same trajectories; a wrong gradient in the making is refused."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from headway.core.trajectory import StopReason, Trajectory
from headway.errors import InvalidInput
from headway.workflow import as_trajectories
from headway.workflow.errors import RewardFailed

PLAIN: dict[str, list[Any]] = {
    "input_ids": [5, 6, 7, 8],
    "logprobs": [0.0, 0.0, -0.5, -0.25],
    "loss_mask": [0, 0, 1, 1],
    "versions": [-1, -1, 3, 4],
    "attention_mask": [1, 1, 1, 1],
}


def as_lists(rank: int) -> dict[str, Any]:
    rows = {name: values if rank == 1 else [values] for name, values in PLAIN.items()}
    return {**rows, "rewards": 1.5 if rank == 1 else [1.5]}


FORMS = {
    "lists [L]": as_lists(1),
    "lists [1, L]": as_lists(2),
    "numpy [L]": {name: np.array(value) for name, value in as_lists(1).items()},
    "numpy [1, L]": {name: np.array(value) for name, value in as_lists(2).items()},
    "torch [L]": {name: torch.tensor(value) for name, value in as_lists(1).items()},
    "torch [1, L]": {name: torch.tensor(value) for name, value in as_lists(2).items()},
    "torch bfloat16 with a gradient": {
        **as_lists(2),
        "logprobs": torch.tensor([PLAIN["logprobs"]], dtype=torch.bfloat16, requires_grad=True),
    },
    "without attention_mask": {name: value for name, value in as_lists(2).items() if name != "attention_mask"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_trajectory(form: str) -> None:
    (trajectory,) = as_trajectories(FORMS[form])
    assert trajectory.input_ids.tolist() == [5, 6, 7, 8]
    assert trajectory.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert trajectory.loss_mask.tolist() == [False, False, True, True]
    assert trajectory.versions.tolist() == [-1, -1, 3, 4]
    assert trajectory.reward == 1.5
    dtypes = [array.dtype for array in (trajectory.input_ids, trajectory.logprobs, trajectory.versions)]
    assert dtypes == [np.int32, np.float32, np.int32]


def test_a_padded_batch_becomes_one_trajectory_a_row() -> None:
    padded = {name: torch.tensor([values, values]) for name, values in PLAIN.items()}
    padded["attention_mask"][1] = torch.tensor([1, 1, 1, 0])
    padded["rewards"] = torch.tensor([1.0, 0.0])
    first, second = as_trajectories(padded)
    assert (len(first), first.reward) == (4, 1.0)
    assert (second.input_ids.tolist(), second.reward) == ([5, 6, 7], 0.0)


def test_several_results_are_put_one_after_the_other() -> None:
    (own,) = as_trajectories(as_lists(1))
    assert len(as_trajectories([own, as_lists(2), None, [as_lists(1)]])) == 3


def test_none_is_a_rejection() -> None:
    assert as_trajectories(None) == []


def test_the_stop_reason_is_kept() -> None:
    (trajectory,) = as_trajectories({**as_lists(1), "stop_reason": "length"})
    assert trajectory.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": [-1, -1, 3]}, r"`versions` has shape \[1, 3\]"),
        ({"versions": [-1, -1, -1, 4]}, "0 or more"),
        ({"logprobs": [0.0, 0.0, float("nan"), -1.0]}, "finite"),
        ({"logprobs": [0.0, 0.0, 2.0, -1.0]}, "not positive"),
        ({"rewards": [1.0, 2.0]}, "2 values for 1"),
        ({"input_ids": [["a", "b", "c", "d"]]}, "no numbers"),
        ({"input_ids": [[1, 2], [3]]}, "ragged"),
        ({"attention_mask": [0, 0, 0, 0]}, "not 0"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        as_trajectories({**as_lists(1), **change})


def test_a_missing_part_is_named() -> None:
    with pytest.raises(InvalidInput, match="lacks versions, rewards"):
        as_trajectories({name: PLAIN[name] for name in ("input_ids", "logprobs", "loss_mask")})


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_fails_as_a_reward(reward: float | None) -> None:
    with pytest.raises(RewardFailed):
        as_trajectories({**as_lists(1), "rewards": reward})


def test_an_integer_reward_is_a_reward() -> None:
    (trajectory,) = as_trajectories({**as_lists(1), "rewards": 1})
    assert trajectory.reward == 1.0


def test_our_own_trajectories_are_checked_too() -> None:
    (good,) = as_trajectories(as_lists(1))
    bad = Trajectory(good.input_ids, good.logprobs[:2], good.loss_mask, good.versions, 1.0)
    with pytest.raises(InvalidInput, match="one length"):
        as_trajectories(bad)


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidInput, match="returned str"):
        as_trajectories("text")  # type: ignore[arg-type]


def test_workflows_load_no_torch() -> None:
    code = "import headway.workflow, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
