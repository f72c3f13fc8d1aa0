"""Tool calls as models write them; whose sampling counts; which histories are the same; a real template by turns."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headway.config.rollout import GenerationHyperparameters
from headway.errors import InvalidInput
from headway.gateway.history import history_keys
from headway.gateway.render import ChatRenderer
from headway.gateway.sampling import Asked, Rule, combine, cut_at_stop_string
from headway.gateway.tool_calls import Said, ToolCall, find_parser, hermes, llama3_json

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CALL, Said("", [ADD])),
        (f"So:\n{CALL}\n{CALL}", Said("So:", [ADD, ADD])),
        ('<tool_call>{"name": "add"}</tool_call>', Said("", [ToolCall("add", {})])),
    ],
)
def test_calls_are_found_in_the_hermes_form(text: str, said: Said) -> None:
    assert hermes(text, ["add"]) == said


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "drop", "arguments": {}}</tool_call>',
        f"{CALL}<tool_call>oops</tool_call>",
        f'{CALL}<tool_call>{{"name": "add", "arg',
    ],
)
def test_what_cannot_be_read_stays_text_as_a_whole(text: str) -> None:
    assert hermes(text, ["add"]) == Said(text)


def test_llama_writes_a_call_as_the_whole_answer() -> None:
    assert llama3_json('{"name": "add", "parameters": {"a": 1}}', ["add"]) == Said("", [ADD])
    assert llama3_json("It is 2.", ["add"]) == Said("It is 2.")


def shouting(text: str, tools: Any) -> Said:
    return Said(text.upper())


def test_a_parser_of_ones_own_goes_by_its_import_path() -> None:
    assert find_parser(f"{__name__}.shouting") is shouting
    with pytest.raises(InvalidInput, match="llama3_json"):
        find_parser("lama3_json")


def test_the_experiments_sampling_counts_and_the_rest_is_told() -> None:
    gconfig = GenerationHyperparameters(temperature=1.0, stop=["a"])
    asked = Asked(max_tokens=5, temperature=0.5, top_p=1.0, stop=("b",))
    used, overridden = combine(gconfig, asked, Rule.EXPERIMENT, budget=9)
    assert (used.temperature, used.max_new_tokens, used.stop) == (1.0, 5, ["a", "b"])
    assert overridden == {"temperature": 0.5}


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (0.5, False), (None, True)])
def test_the_clients_sampling_counts_where_it_may(temperature: float | None, is_greedy: bool) -> None:
    gconfig = GenerationHyperparameters(greedy=True)
    used, overridden = combine(gconfig, Asked(temperature=temperature), Rule.CLIENT, budget=9)
    assert (used.greedy, used.max_new_tokens, overridden) == (is_greedy, 9, {})


def test_the_first_stop_string_cuts() -> None:
    assert cut_at_stop_string("one two", ("two", "ne")) == ("o", "ne")
    assert cut_at_stop_string("one two", ("three",)) == ("one two", None)


def test_a_history_is_its_messages_and_its_tools() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    other = {"id": "x", "function": {"name": "f", "arguments": {"b": 2, "a": 1}}}
    said: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert history_keys(None, [said])[-1] == history_keys(None, [{**said, "content": " ", "tool_calls": [other]}])[-1]
    for change in ({"content": "x"}, {"tool_calls": []}, {"role": "user"}):
        assert history_keys(None, [said])[-1] != history_keys(None, [{**said, **change}])[-1]
    assert history_keys(["tool"], [said])[-1] != history_keys(None, [said])[-1]


def test_what_follows_an_answer_is_what_the_whole_template_writes_there() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/models/calculator_agent")
    renderer = ChatRenderer(tokenizer)
    function = {"name": "calculator", "arguments": {"expression": "7*8+5"}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
    asked = {"role": "user", "content": "7*8+5"}
    called: Any = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": "61"}
    said = tokenizer.encode(f"<tool_call>{json.dumps(function)}</tool_call><|im_end|>", add_special_tokens=False)
    whole = renderer.first([asked, called, result], tools=tools)
    assert renderer.first([asked], tools=tools) + said + renderer.after(called, [result], tools=tools) == whole


FORGETFUL = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and loop.last %}
{{- '(thoughts)' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Keeps the thoughts of the last answer only, as templates of thinking models do."""


def test_a_template_that_forgets_earlier_thoughts_can_go_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/models/calculator_agent")
    tokenizer.chat_template = FORGETFUL
    told = ChatRenderer(tokenizer).after({"role": "assistant", "content": "x"}, [{"role": "user", "content": "y"}])
    assert tokenizer.decode(told) == "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_an_end_of_answers_cannot_rewrite_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/models/calculator_agent")
    tokenizer.chat_template = FORGETFUL.replace("<|im_end|>", "")
    with pytest.raises(InvalidInput, match="rewrites earlier turns"):
        ChatRenderer(tokenizer).after({"role": "assistant", "content": "x"}, [{"role": "user", "content": "y"}])


def test_a_template_that_refuses_is_the_clients_mistake() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/models/calculator_agent")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInput, match="roles must alternate"):
        ChatRenderer(tokenizer).first([{"role": "user", "content": "7"}])
