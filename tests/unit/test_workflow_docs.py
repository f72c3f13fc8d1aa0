"""The workflow that the documentation shows runs as it stands there."""

import re
from pathlib import Path
from typing import Any

from workflow_fakes import EOS, CharTokenizer, ListEngine, right_is_one

from headway.workflow import GenerationHyperparameters

PAGE = Path(__file__).parents[2] / "docs/workflows.md"


async def test_the_documented_workflow_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    tokenizer = CharTokenizer()
    workflow = names["Twice"](right_is_one, GenerationHyperparameters(max_new_tokens=20), tokenizer)
    engine = ListEngine([f"41{chr(EOS)}", f"42{chr(EOS)}"])
    trajectory = await workflow.arun_episode(engine, {"prompt": "6*7=", "answer": "42"})
    assert trajectory.reward == 1.0
    text = "".join("." if token == EOS else chr(token) for token in trajectory.input_ids)
    assert text == "6*7=41.Are you sure?42."
    assert trajectory.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] * 13 + [True] * 3
