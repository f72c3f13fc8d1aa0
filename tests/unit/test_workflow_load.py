"""User code is found by import path, is given what it names, and mistakes are told in one line."""

from typing import Any

import pytest
from workflow_fakes import CharTokenizer, right_is_one

from headway.errors import InvalidInput
from headway.workflow import (
    GenerationHyperparameters,
    InferenceEngine,
    MultiTurnWorkflow,
    RolloutWorkflow,
    load_filter,
    load_object,
    load_workflow,
    rewards_differ,
)

GCONFIG = GenerationHyperparameters(n_samples=4)


def load(path: str, **kwargs: Any) -> Any:
    return load_workflow(path, kwargs, reward_fn=right_is_one, gconfig=GCONFIG, tokenizer=CharTokenizer())


class Bare(RolloutWorkflow):
    """Takes no standard argument."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        return None


class Greedy(Bare):
    """Takes whatever there is."""

    def __init__(self, **kwargs: Any) -> None:
        self.given = kwargs


def test_a_workflow_gets_the_standard_arguments_and_its_own() -> None:
    workflow = load("headway.workflow.MultiTurnWorkflow", max_turns=7)
    assert isinstance(workflow, MultiTurnWorkflow)
    assert workflow._max_turns == 7


def test_a_workflow_makes_one_sample_at_a_time() -> None:
    assert load(f"{__name__}.Greedy").given["gconfig"].n_samples == 1


def test_a_workflow_gets_only_what_it_names() -> None:
    assert isinstance(load(f"{__name__}:Bare"), Bare)


def test_own_arguments_win() -> None:
    own = GenerationHyperparameters(max_new_tokens=7)
    assert load(f"{__name__}.Greedy", gconfig=own).given["gconfig"] is own


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("headway.workflow.RLVRWorkflwo", "did you mean 'RLVRWorkflow'"),
        ("headway.nowhere.Thing", "no module 'headway.nowhere'"),
        ("RLVRWorkflow", "is no import path"),
        ("headway.workflow.rewards_differ", "no method arun_episode"),
    ],
)
def test_a_wrong_path_is_told(path: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        load(path)


def test_unknown_arguments_are_told() -> None:
    with pytest.raises(InvalidInput, match="max_turn"):
        load("headway.workflow.MultiTurnWorkflow", max_turn=7)


def test_impossible_arguments_are_told() -> None:
    with pytest.raises(InvalidInput, match="at least one turn"):
        load("headway.workflow.MultiTurnWorkflow", max_turns=0)


def test_filters_are_loaded_by_path() -> None:
    assert load_filter("headway.workflow.rewards_differ") is rewards_differ
    assert load_filter(None) is None
    with pytest.raises(InvalidInput, match="is no function"):
        load_filter("headway.core.version.LABEL")


def test_objects_are_found_with_dot_or_colon() -> None:
    assert load_object("math:pi") == load_object("math.pi")
