"""Episodes of one or several turns: answers carry gradient, all else has mask 0, version -1; no id is encoded twice."""

from itertools import groupby

import pytest
from workflow_fakes import EOS, CharTokenizer, ListEngine, right_is_one

from examples.calculator import CalculatorWorkflow
from headway.core.trajectory import StopReason, Trajectory
from headway.workflow import GenerationHyperparameters, MultiTurnWorkflow, RLVRWorkflow
from headway.workflow.errors import PromptTooLong

TOKENIZER = CharTokenizer()
ROW = {"messages": [{"role": "user", "content": "six times seven?"}], "answer": "42"}
WRONG, RIGHT, UNFINISHED = f"41{chr(EOS)}", f"42{chr(EOS)}", "40"


def multi_turn(max_new_tokens: int = 100, **kwargs: float | int | str) -> MultiTurnWorkflow:
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens)
    return MultiTurnWorkflow(right_is_one, gconfig, TOKENIZER, **{"try_again": "no", **kwargs})  # type: ignore[arg-type]


def parts(trajectory: Trajectory) -> list[tuple[bool, str]]:
    """The text in runs of equal mask, with the end token shown as a full stop."""
    pairs = zip(trajectory.loss_mask.tolist(), trajectory.input_ids.tolist(), strict=True)
    text = lambda run: "".join("." if token == EOS else chr(token) for _, token in run)  # noqa: E731
    return [(is_generated, text(run)) for is_generated, run in groupby(pairs, key=lambda pair: pair[0])]


def check_stamps(trajectory: Trajectory, step: int = 3) -> None:
    mask = trajectory.loss_mask
    assert set(trajectory.versions[mask].tolist()) == {step}
    assert set(trajectory.versions[~mask].tolist()) == {-1}
    assert (trajectory.logprobs[~mask] == 0).all()
    assert (trajectory.logprobs[mask] == -0.5).all()


async def test_one_turn_is_prompt_and_completion() -> None:
    workflow = RLVRWorkflow(right_is_one, GenerationHyperparameters(max_new_tokens=10), TOKENIZER)
    trajectory = await workflow.arun_episode(ListEngine([RIGHT]), dict(ROW))
    assert parts(trajectory) == [(False, "<user>six times seven?.\n<assistant>"), (True, "42.")]
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.STOP)
    check_stamps(trajectory)


async def test_a_plain_prompt_goes_in_as_it_is() -> None:
    workflow = RLVRWorkflow(right_is_one, GenerationHyperparameters(), TOKENIZER)
    trajectory = await workflow.arun_episode(ListEngine([UNFINISHED]), {"prompt": "6*7=", "answer": "42"})
    assert parts(trajectory) == [(False, "6*7="), (True, "40")]
    assert (trajectory.reward, trajectory.stop_reason) == (0.0, StopReason.LENGTH)


async def test_thinking_is_left_to_the_template_unless_said() -> None:
    workflow = RLVRWorkflow(right_is_one, GenerationHyperparameters(), TOKENIZER, enable_thinking=True)
    engine = ListEngine([RIGHT])
    await workflow.arun_episode(engine, dict(ROW))
    assert TOKENIZER.decode(engine.requests[0].input_ids).endswith("<assistant><think>")


async def test_turns_go_on_until_the_answer_is_right() -> None:
    trajectory = await multi_turn().arun_episode(ListEngine([WRONG, WRONG, RIGHT]), dict(ROW))
    assert parts(trajectory) == [
        (False, "<user>six times seven?.\n<assistant>"),
        (True, "41."),
        (False, "\n<user>no.\n<assistant>"),
        (True, "41."),
        (False, "\n<user>no.\n<assistant>"),
        (True, "42."),
    ]
    assert trajectory.metrics == {"num_turns": 3.0}
    check_stamps(trajectory)


async def test_each_turn_continues_exactly_the_ids_so_far() -> None:
    engine = ListEngine([WRONG, UNFINISHED, RIGHT])
    trajectory = await multi_turn().arun_episode(engine, dict(ROW))
    for request in engine.requests:
        assert trajectory.input_ids[: len(request.input_ids)].tolist() == request.input_ids


async def test_an_unfinished_answer_is_closed_before_the_next_question() -> None:
    trajectory = await multi_turn().arun_episode(ListEngine([UNFINISHED, RIGHT]), dict(ROW))
    assert parts(trajectory)[1:3] == [(True, "40"), (False, ".\n<user>no.\n<assistant>")]


@pytest.mark.parametrize(("wrong_turns", "reward"), [(0, 1.0), (1, 0.5), (2, 0.25)])
async def test_each_turn_before_the_right_one_is_discounted_once(wrong_turns: int, reward: float) -> None:
    engine = ListEngine([WRONG] * wrong_turns + [RIGHT])
    trajectory = await multi_turn(turn_discount=0.5).arun_episode(engine, dict(ROW))
    assert trajectory.reward == reward


async def test_turns_end_at_max_turns() -> None:
    engine = ListEngine([WRONG] * 5)
    trajectory = await multi_turn(max_turns=2).arun_episode(engine, dict(ROW))
    assert (len(engine.requests), trajectory.reward) == (2, 0.0)


async def test_the_budget_is_that_of_the_whole_episode() -> None:
    engine = ListEngine([WRONG] * 5)
    await multi_turn(max_new_tokens=6, max_turns=5).arun_episode(engine, dict(ROW))
    assert [request.gconfig.max_new_tokens for request in engine.requests] == [6, 3]


async def test_a_full_context_ends_the_episode_with_what_it_has() -> None:
    engine = ListEngine([WRONG, PromptTooLong("full")])
    trajectory = await multi_turn().arun_episode(engine, dict(ROW))
    assert parts(trajectory)[-1] == (True, "41.")


async def test_a_first_prompt_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(PromptTooLong):
        await multi_turn().arun_episode(ListEngine([PromptTooLong("long")]), dict(ROW))


async def test_tool_calls_are_answered_in_the_middle_of_the_sequence() -> None:
    workflow = CalculatorWorkflow(right_is_one, GenerationHyperparameters(max_new_tokens=100), TOKENIZER)
    engine = ListEngine(["<calc>6*7</calc>", f"so 42{chr(EOS)}"])
    trajectory = await workflow.arun_episode(engine, dict(ROW))
    assert parts(trajectory)[1:] == [(True, "<calc>6*7</calc>"), (False, "=42"), (True, "so 42.")]
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"num_tool_calls": 1.0})
    check_stamps(trajectory)


async def test_tool_calls_are_bounded() -> None:
    workflow = CalculatorWorkflow(right_is_one, GenerationHyperparameters(), TOKENIZER, max_calls=2)
    engine = ListEngine(["<calc>1+1</calc>"] * 9)
    trajectory = await workflow.arun_episode(engine, dict(ROW))
    assert len(engine.requests) == 3
    assert parts(trajectory)[-1][0], "the sequence ends with what the model wrote"
