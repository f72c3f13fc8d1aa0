"""An agent with a calculator, written for the `openai` client: it knows nothing of training.

    user        7*8+5
    assistant   <tool_call>{"name": "calculator", "arguments": {"expression": "7*8+5"}}</tool_call>
    tool        61
    assistant   61

The rows also have `messages` and `answer` for the supervised phase before training. It shows the policy all that may
happen, at random: calling the calculator, reading its result, and guessing, which is hardly ever right. That calling
pays is for reinforcement learning to find out.
"""

import json
import random
from typing import Any

from openai import AsyncOpenAI

from examples.calculator import calculate

QUESTIONS = [f"{a}*{b}+{c}" for a in range(2, 10) for b in range(2, 10) for c in range(2, 10)]
NUM_HELD_OUT = 128
MAX_CALLS = 3
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of a sum of products.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "tools: calculator(expression)"}
"""What the chat template makes of `TOOLS`."""


async def agent(data: dict[str, Any], client: AsyncOpenAI) -> float:
    """Answer the row's question with the calculator; 1.0 when the answer is right."""
    messages: list[Any] = [{"role": "user", "content": data["question"]}]
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return float(message.content == data["result"])
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": use(call)})
    return 0.0


def use(call: Any) -> str:
    """What the calculator says to a call."""
    expression = json.loads(call.function.arguments).get("expression")
    return calculate(expression) if isinstance(expression, str) else "error"


def rows(split: str = "train", seed: int = 0, size: int = 8192) -> list[dict[str, Any]]:
    """Rows {"question", "result", "messages", "answer"}; questions of "test" are none of "train".

    Example:
        >>> row = rows("test")[0]
        >>> row["question"], row["result"]
        ('8*3+4', '28')
    """
    questions = random.Random(0).sample(QUESTIONS, len(QUESTIONS))
    if split != "train":
        return [_row(question, random.Random(question)) for question in questions[:NUM_HELD_OUT]]
    rng = random.Random(seed)
    return [_row(rng.choice(questions[NUM_HELD_OUT:]), rng) for _ in range(size)]


def _row(question: str, rng: random.Random) -> dict[str, Any]:
    result = calculate(question)
    asked = [SYSTEM, {"role": "user", "content": question}]
    function = {"name": "calculator", "arguments": {"expression": question}}
    called = [*asked, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    call: tuple[Any, str] = (asked, f"<tool_call>{json.dumps(function)}</tool_call>")
    guess: tuple[Any, str] = (asked, str(rng.randint(6, 90)))
    reading: tuple[Any, str] = ([*called, {"role": "tool", "content": result}], result)
    messages, answer = rng.choice([call, guess, guess, reading])
    return {"question": question, "result": result, "messages": messages, "answer": answer}
