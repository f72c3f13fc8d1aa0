"""The official `openai` client against the gateway: answers, streams, tools, several choices, log-probs, errors."""

import asyncio
from typing import Any

import openai
import pytest
from gateway_server import openai_client, serve

from headway.gateway.policy import Limits
from headway.gateway.sampling import Rule
from headway.testing.scripted_policy import EOS, LOGPROB, answers
from headway.workflow.errors import PromptTooLong, ServerLost

QUESTION: Any = {"role": "user", "content": "six times seven?"}
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}


async def test_an_answer_has_what_clients_expect() -> None:
    async with serve(answers("42")) as here, openai_client((await here.open())[1]) as client:
        reply = await client.chat.completions.create(model="any", messages=[QUESTION])
        (choice,) = reply.choices
        assert (choice.message.content, choice.finish_reason, choice.message.role) == ("42", "stop", "assistant")
        assert (reply.object, reply.model) == ("chat.completion", "any")
        assert reply.usage is not None
        prompt = len(f"<user>six times seven?{chr(EOS)}\n<assistant>")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt, 3)


async def test_a_stream_adds_up_to_the_answer() -> None:
    async with serve(answers("The answer is 42.")) as here, openai_client((await here.open())[1]) as client:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="m", messages=[QUESTION], stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(delta or "" for delta in deltas) == "The answer is 42."
        assert len(deltas) > 3
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 18


async def test_tools_are_called_and_answered_on_the_same_ids() -> None:
    async with serve(answers(f"Let me see. {CALL}", "42")) as here:
        session, access = await here.open()
        async with openai_client(access) as client:
            messages = [QUESTION]
            first = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me see."
            assert message.tool_calls is not None
            call: Any = message.tool_calls[0]
            assert (call.function.name, call.function.arguments) == ("multiply", '{"a":6,"b":7}')
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
            last = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            assert last.choices[0].message.content == "42"
        first_request, second_request = here.engine.requests
        made = [ord(character) for character in f"Let me see. {CALL}{chr(EOS)}"]
        told = [ord(character) for character in f"\n<tool>42{chr(EOS)}\n<assistant>"]
        assert second_request.input_ids == first_request.input_ids + made + told
        (trajectory,) = session.trajectories(1.0)
        assert trajectory.loss_mask.sum() == len(made) + len("42") + 1
        assert session.num_drifts == 0


async def test_streamed_tool_calls_come_whole() -> None:
    async with serve(answers(CALL)) as here, openai_client((await here.open())[1]) as client:
        stream = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL], stream=True)
        calls = [c for chunk in [c async for c in stream] for c in chunk.choices[0].delta.tool_calls or []]
        (function,) = [call.function for call in calls]
        assert function is not None
        assert (function.name, function.arguments) == ("multiply", '{"a":6,"b":7}')


@pytest.mark.parametrize("text", ["<tool_call>{oops</tool_call>", '<tool_call>{"name": "divide"}</tool_call>'])
async def test_a_call_that_cannot_be_read_is_text(text: str) -> None:
    async with serve(answers(text)) as here, openai_client((await here.open())[1]) as client:
        reply = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (text, "stop")


async def test_tool_choice_none_looks_for_no_calls() -> None:
    async with serve(answers(CALL)) as here, openai_client((await here.open())[1]) as client:
        reply = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL], tool_choice="none")
        assert reply.choices[0].message.tool_calls is None
        assert reply.choices[0].message.content == CALL


async def test_several_choices_are_branches_of_one_prompt() -> None:
    async with serve(answers("41", "42", "43", "so 42")) as here:
        session, access = await here.open()
        async with openai_client(access) as client:
            reply = await client.chat.completions.create(model="m", messages=[QUESTION], n=3)
            assert [choice.message.content for choice in reply.choices] == ["41", "42", "43"]
            messages: Any = [QUESTION, reply.choices[1].message, {"role": "user", "content": "sure?"}]
            await client.chat.completions.create(model="m", messages=messages)
        made = session.trajectories(1.0)
        assert [int(trajectory.loss_mask.sum()) for trajectory in made] == [9, 3, 3]
        assert session.num_drifts == 0


async def test_log_probabilities_are_those_of_the_tokens() -> None:
    async with serve(answers("42")) as here, openai_client((await here.open())[1]) as client:
        reply = await client.chat.completions.create(model="m", messages=[QUESTION], logprobs=True)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [(token.token, token.logprob) for token in logprobs.content] == [
            ("4", LOGPROB), ("2", LOGPROB), (chr(EOS), LOGPROB),
        ]  # fmt: skip


async def test_completions_go_on_with_the_ids_of_their_own_text() -> None:
    async with serve(answers(" 42", "yes")) as here:
        session, access = await here.open()
        async with openai_client(access) as client:
            first = await client.completions.create(model="m", prompt="6*7 =", logprobs=0)
            assert (first.choices[0].text, first.choices[0].finish_reason) == (" 42", "stop")
            assert first.choices[0].logprobs is not None
            assert first.choices[0].logprobs.text_offset == [0, 1, 2, 3]
            stream = await client.completions.create(model="m", prompt=f"6*7 = 42{chr(EOS)} sure? ", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "yes"
        (trajectory,) = session.trajectories(1.0)
        assert trajectory.loss_mask.sum() == 8


async def test_models_are_listed() -> None:
    async with serve(answers()) as here, openai_client((await here.open())[1]) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).owned_by == "headway"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("gpt-x")


async def test_parameters_reach_the_engine() -> None:
    async with serve(answers("42 END")) as here, openai_client((await here.open())[1]) as client:
        reply = await client.chat.completions.create(
            model="m",
            messages=[QUESTION],
            max_completion_tokens=50,
            temperature=0.5,
            top_p=0.9,
            stop=["END"],
            user="me",
        )
        assert reply.choices[0].message.content == "42 "
        gconfig = here.engine.requests[0].gconfig
        assert (gconfig.max_new_tokens, gconfig.temperature, gconfig.top_p, gconfig.stop) == (50, 0.5, 0.9, ["END"])


async def test_the_experiments_temperature_counts_in_training_and_the_answer_says_so() -> None:
    async with serve(answers("42"), rule=Rule.EXPERIMENT) as here, openai_client((await here.open())[1]) as client:
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=[QUESTION], temperature=0.2)
        assert raw.headers["headway-overridden"] == "temperature=0.2"
        assert here.engine.requests[0].gconfig.temperature == 1.0


async def test_an_answer_that_is_cut_off_says_so() -> None:
    async with serve(answers("42, and so on")) as here, openai_client((await here.open())[1]) as client:
        reply = await client.chat.completions.create(model="m", messages=[QUESTION], max_tokens=2)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("42", "length")


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"seed": 7}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"beams": 3}}, "beams"),
        ({"temperature": 3.0}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "It is"}]}, "messages"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(given: dict[str, Any], parameter: str) -> None:
    async with serve(answers()) as here, openai_client((await here.open())[1]) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": [QUESTION], **given})
        assert (refused.value.param or "").startswith(parameter)
        assert refused.value.type == "invalid_request_error"


async def test_what_changes_nothing_is_accepted() -> None:
    async with serve(answers("42")) as here, openai_client((await here.open())[1]) as client:
        await client.chat.completions.create(
            model="m",
            messages=[{**QUESTION, "provider_specific_fields": None}],
            extra_body={"beams": None},
            user="me",
            metadata={"a": "b"},
            store=False,
            presence_penalty=0,
            response_format={"type": "text"},
            parallel_tool_calls=True,
        )


async def test_a_full_context_has_openais_code() -> None:
    async with serve(answers(PromptTooLong("a prompt of 9 tokens"))) as here:
        session, access = await here.open()
        async with openai_client(access) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[QUESTION])
            assert refused.value.code == "context_length_exceeded"
            assert isinstance(session.failure, PromptTooLong)


async def test_a_session_has_room_for_so_many_answers_and_tokens() -> None:
    async with serve(answers("1", "2")) as here:
        _, access = await here.open(limits=Limits(max_turns=1))
        async with openai_client(access) as client:
            await client.chat.completions.create(model="m", messages=[QUESTION])
            with pytest.raises(openai.BadRequestError, match="1 answers of 1"):
                await client.chat.completions.create(model="m", messages=[QUESTION])


async def test_the_budget_of_a_branch_is_that_of_the_experiment() -> None:
    async with serve(answers("123", "123"), max_new_tokens=6) as here, openai_client((await here.open())[1]) as client:
        first = await client.chat.completions.create(model="m", messages=[QUESTION])
        messages: Any = [QUESTION, first.choices[0].message, QUESTION]
        second = await client.chat.completions.create(model="m", messages=messages)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("12", "length")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[*messages, second.choices[0].message, QUESTION])
        assert refused.value.code == "context_length_exceeded"


async def test_lost_engines_are_a_status_that_clients_try_again() -> None:
    async with serve(answers(ServerLost("all are gone"), "42")) as here:
        session, access = await here.open()
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.api_key, max_retries=1)
        async with client:
            reply = await client.chat.completions.create(model="m", messages=[QUESTION])
            assert reply.choices[0].message.content == "42"
        assert session.failure is None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_withdraws_its_request(is_stream: bool) -> None:
    async with serve(answers("42")) as here:
        session, access = await here.open()
        here.engine.hold()
        async with openai_client(access) as client:
            call: Any = client.chat.completions.create(model="m", messages=[QUESTION], stream=is_stream)
            calling = asyncio.ensure_future(call)
            await here.engine.until(lambda engine: len(engine.requests) == 1)
            calling.cancel()
            await asyncio.wait({calling})
        await here.engine.until(lambda engine: engine.num_withdrawn == 1)
        assert session.transcript.turns == {}


async def test_a_client_that_leaves_a_stream_withdraws_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout_controller.gateway_http.PING_S", 0.01)
    async with serve(answers("42")) as here, openai_client((await here.open())[1]) as client:
        here.engine.hold()
        stream = await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
        await stream.close()
        await here.engine.until(lambda engine: engine.num_withdrawn == 1)


async def test_a_long_wait_is_bridged_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout_controller.gateway_http.PING_S", 0.01)
    for script, expected in ((answers("42"), "42"), (answers(ServerLost("all are gone")), "all are gone")):
        async with serve(script) as here, openai_client((await here.open())[1]) as client:
            here.engine.hold()
            stream = await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
            here.engine.release()
            try:
                seen = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            except openai.APIError as error:
                seen = error.message
            assert seen == expected
