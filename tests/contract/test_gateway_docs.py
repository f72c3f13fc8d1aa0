"""The agent that the documentation shows runs as it stands there."""

import re
import sys
import types
from pathlib import Path

import pytest
from gateway_server import serve
from test_gateway_agents import workflow

from headway.testing.scripted_policy import answers

PAGE = Path(__file__).parents[2] / "docs/agents.md"


async def test_the_documented_agent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = types.ModuleType("documented")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "documented", module)
    async with serve(answers("41", "42")) as here:
        flow = workflow(here, agent="documented.agent")
        (trajectory,) = await flow.arun_episode(here.engine, {"question": "six times seven?", "answer": "42"})
    assert trajectory.reward == 1.0
    assert trajectory.loss_mask.sum() == 2 * len("42.")
