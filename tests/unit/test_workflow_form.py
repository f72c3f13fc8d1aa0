"""With `rollout.check_trajectory_format`, a result at fault is refused, and the message names the first fault."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from headway.core.trajectory import Trajectory
from headway.errors import InvalidInput
from headway.workflow.form import check_form

DICT: dict[str, Any] = {
    "input_ids": torch.tensor([[5, 6, 7, 8]]),
    "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.25]]),
    "loss_mask": torch.tensor([[0, 0, 1, 1]]),
    "versions": torch.tensor([[-1, -1, 3, 4]]),
    "attention_mask": torch.ones((1, 4), dtype=torch.bool),
    "rewards": torch.tensor([1.5]),
}
LISTS = {name: value[0].tolist() for name, value in DICT.items() if name != "attention_mask"}
TRAJECTORY = Trajectory(
    np.array([5, 6], np.int32),
    np.array([0, -0.5], np.float32),
    np.array([False, True]),
    np.array([-1, 3], np.int32),
    1.0,
)


@pytest.mark.parametrize("result", [DICT, LISTS, TRAJECTORY, [TRAJECTORY, DICT], None, []])
def test_what_is_well_formed_passes(result: Any) -> None:
    check_form(result)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"input_ids": torch.tensor([[5.0, 6.0, 7.0, 8.0]])}, "input_ids holds float32; expected whole numbers"),
        ({"input_ids": torch.tensor([[5, 6, 7, -8]])}, "input_ids has -8"),
        ({"input_ids": torch.zeros((1, 1, 4), dtype=torch.int64)}, r"input_ids has shape \[1, 1, 4\]"),
        ({"logprobs": torch.zeros((1, 4), dtype=torch.int64)}, "logprobs holds int64; expected floating-point"),
        ({"logprobs": torch.zeros((1, 3))}, r"logprobs has shape \[1, 3\], input_ids has \[1, 4\]"),
        ({"logprobs": [["a"]]}, "logprobs: list holds no numbers"),
        ({"loss_mask": torch.tensor([[0, 0, 0.5, 1]])}, "loss_mask has values other than 0 and 1"),
        ({"versions": torch.tensor([[-1, -1, 3.0, 4]])}, "versions holds float32"),
        ({"versions": torch.tensor([[-2, -1, 3, 4]])}, "versions has -2"),
        ({"attention_mask": torch.ones(4)}, r"attention_mask has shape \[4\]"),
        ({"rewards": torch.ones(2)}, r"rewards has shape \[2\]; expected one for each sequence"),
        ({"rewards": torch.tensor([float("nan")])}, "rewards has values that are no finite number"),
    ],
)
def test_a_dict_at_fault_is_refused_by_the_name_of_its_part(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidInput, match=fault):
        check_form({**DICT, **changes})


def test_a_dict_that_lacks_a_part_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lacks versions; it has"):
        check_form({name: value for name, value in DICT.items() if name != "versions"})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"input_ids": np.array([5, 6])}, "input_ids is of type int64; expected an array of int32"),
        ({"loss_mask": [False, True]}, "loss_mask is of type list; expected an array of bool"),
        ({"versions": np.array([3], np.int32)}, r"versions has shape \[1\], input_ids has \[2\]"),
        ({"reward": None}, "reward is None; expected a finite number"),
        ({"metrics": {"turns": "two"}}, r"metrics\['turns'\] is 'two'"),
    ],
)
def test_a_trajectory_at_fault_is_refused_by_the_name_of_its_part(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidInput, match=fault):
        check_form(dataclasses.replace(TRAJECTORY, **changes))


def test_the_place_in_a_list_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"result\[1\]\[0\]: input_ids has -1"):
        check_form([TRAJECTORY, [{**LISTS, "input_ids": [-1, 6, 7, 8]}]])


def test_anything_else_is_refused() -> None:
    with pytest.raises(InvalidInput, match="result is a float"):
        check_form(1.0)  # type: ignore[arg-type]
