"""Answer sums with a calculator: the model calls a tool in the middle of its answer, and goes on with the result.

    prompt          What is 17*23+5?
    model           <calc>17*23+5</calc>          carries gradient
    workflow        =396                          mask 0, version -1
    model           The answer is 396.            carries gradient

The whole is one sequence of token ids: the call's tokens are kept as they were generated, never decoded and encoded
again. Use it with `workflow.path: examples.calculator.CalculatorWorkflow` and `train_dataset.path:
python:examples.calculator.rows`.
"""

import ast
import operator
import random
from collections.abc import Callable
from typing import Any

from headway.core.trajectory import StopReason, Trajectory
from headway.workflow import (
    Conversation,
    GenerationHyperparameters,
    InferenceEngine,
    RewardFunction,
    RolloutWorkflow,
    Tokenizer,
)
from headway.workflow.prompts import PromptEncoder

CALL, END_OF_CALL = "<calc>", "</calc>"
LONGEST_EXPRESSION = 100
INSTRUCTION = f"Answer the question. You may write {CALL}expression{END_OF_CALL} to use a calculator. What is {{}}?"
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def rows(split: str = "train", seed: int = 0, size: int = 2000) -> list[dict[str, Any]]:
    """Rows {"messages", "answer"} of a split, "train" or "test".

    Example:
        >>> rows("test", size=1)[0]["answer"]
        '4864'
    """
    rng = random.Random(f"{split}/{seed}")
    questions = [f"{rng.randint(2, 99)}*{rng.randint(2, 99)}+{rng.randint(2, 99)}" for _ in range(size)]
    return [
        {"messages": [{"role": "user", "content": INSTRUCTION.format(question)}], "answer": calculate(question)}
        for question in questions
    ]


class CalculatorWorkflow(RolloutWorkflow):
    """Generates until the model ends without a call, made `max_calls` of them, or has used up its budget."""

    def __init__(
        self,
        reward_fn: RewardFunction,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        max_calls: int = 4,
    ) -> None:
        self._reward_fn = reward_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._max_calls = max_calls
        self._prompts = PromptEncoder(tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        conversation = Conversation(engine, self._gconfig, self._tokenizer)
        prompt_ids, prompt = self._prompts.encode(data)
        told, calls = prompt_ids, 0
        while (response := await conversation.answer_to(told, tool_call_stops=(END_OF_CALL,))) is not None:
            if response.stop_reason is not StopReason.TOOL_CALLS or calls == self._max_calls:
                break
            calls += 1
            result = call(self._tokenizer.decode(response.output_tokens))
            told = self._tokenizer.encode(result, add_special_tokens=False)
        completion_ids = conversation.sequence.ids[len(prompt_ids) :]
        completion = self._tokenizer.decode(completion_ids, skip_special_tokens=True)
        reward = await self._reward_fn(prompt, completion, prompt_ids, completion_ids, **data)
        return conversation.sequence.trajectory(float(reward), {"num_tool_calls": float(calls)})


def call(text: str) -> str:
    """What the calculator answers to a text that ends in a call.

    Example:
        >>> call("so <calc>17*23+5</calc>"), call("<calc>2**9**9</calc>")
        ('=396', '=error')
    """
    expression = text.rpartition(CALL)[2].partition(END_OF_CALL)[0]
    return f"={calculate(expression)}"


def calculate(expression: str) -> str:
    """The value of a sum of products of integers, or "error". Nothing else is ever evaluated."""
    try:
        return str(_value(ast.parse(expression[:LONGEST_EXPRESSION].strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not a sum of products of integers")
