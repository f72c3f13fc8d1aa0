"""The official `anthropic` client against the gateway: messages, streams, tools, errors; both share a transcript."""

from typing import Any

import anthropic
import pytest
from gateway_server import anthropic_client, openai_client, serve

from headway.testing.scripted_policy import EOS, answers
from headway.workflow.errors import PromptTooLong, ServerLost

QUESTION: Any = {"role": "user", "content": "six times seven?"}
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
TOOL: Any = {"name": "multiply", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}


async def test_an_answer_has_what_clients_expect() -> None:
    async with serve(answers("42")) as here, anthropic_client((await here.open())[1]) as client:
        reply = await client.messages.create(model="m", max_tokens=50, system="Be short.", messages=[QUESTION])
        (block,) = reply.content
        assert block.type == "text"
        assert (block.text, reply.stop_reason, reply.role, reply.model) == ("42", "end_turn", "assistant", "m")
        prompt = f"<system>Be short.{chr(EOS)}\n<user>six times seven?{chr(EOS)}\n<assistant>"
        assert here.engine.requests[0].input_ids == [ord(character) for character in prompt]
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), 3)


async def test_tools_are_called_and_answered_on_the_same_ids() -> None:
    async with serve(answers(f"Let me see. {CALL}", "42")) as here:
        session, access = await here.open()
        async with anthropic_client(access) as client:
            first = await client.messages.create(model="m", max_tokens=99, messages=[QUESTION], tools=[TOOL])
            assert first.stop_reason == "tool_use"
            text, use = first.content
            assert text.type == "text"
            assert use.type == "tool_use"
            assert (use.name, use.input) == ("multiply", {"a": 6, "b": 7})
            result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "42"}]}
            messages: Any = [
                QUESTION,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            ]
            await client.messages.create(model="m", max_tokens=50, messages=messages, tools=[TOOL])
        first_request, second_request = here.engine.requests
        made = [ord(character) for character in f"Let me see. {CALL}{chr(EOS)}"]
        told = [ord(character) for character in f"\n<tool>42{chr(EOS)}\n<user>Well?{chr(EOS)}\n<assistant>"]
        assert second_request.input_ids == first_request.input_ids + made + told
        assert len(session.trajectories(1.0)) == 1


async def test_a_stream_adds_up_to_the_message() -> None:
    async with serve(answers(f"Let me see. {CALL}")) as here, anthropic_client((await here.open())[1]) as client:
        async with client.messages.stream(model="m", max_tokens=99, messages=[QUESTION], tools=[TOOL]) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        assert "".join(texts) == "Let me see."
        assert len(texts) > 3
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(f"Let me see. {CALL}") + 1
        use = message.content[1]
        assert use.type == "tool_use"
        assert use.input == {"a": 6, "b": 7}


async def test_stop_sequences_are_told() -> None:
    async with serve(answers("42 END")) as here, anthropic_client((await here.open())[1]) as client:
        reply = await client.messages.create(model="m", max_tokens=9, messages=[QUESTION], stop_sequences=["END"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")


async def test_tokens_are_counted_without_an_answer() -> None:
    async with serve(answers()) as here, anthropic_client((await here.open())[1]) as client:
        counted = await client.messages.count_tokens(model="m", messages=[QUESTION])
        assert counted.input_tokens == len(f"<user>six times seven?{chr(EOS)}\n<assistant>")


async def test_both_clients_share_the_transcript_of_a_session() -> None:
    async with serve(answers("42", "sure")) as here:
        session, access = await here.open()
        async with openai_client(access) as first, anthropic_client(access) as second:
            reply = await first.chat.completions.create(model="m", messages=[QUESTION])
            messages: Any = [QUESTION, {"role": "assistant", "content": reply.choices[0].message.content}, QUESTION]
            await second.messages.create(model="m", max_tokens=9, messages=messages)
        assert len(session.trajectories(1.0)) == 1
        assert session.num_drifts == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "It is"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"extra_body": {"beams": 3}}, "beams"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    async with serve(answers()) as here, anthropic_client((await here.open())[1]) as client:
        with pytest.raises(anthropic.BadRequestError, match=named):
            await client.messages.create(**{"model": "m", "max_tokens": 9, "messages": [QUESTION], **given})


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (PromptTooLong("a prompt of 9 tokens"), anthropic.BadRequestError),
        (ServerLost("all are gone"), anthropic.InternalServerError),
    ],
)
async def test_errors_have_anthropics_form(failure: Exception, kind: type[anthropic.APIStatusError]) -> None:
    async with serve(answers(failure)) as here, anthropic_client((await here.open())[1]) as client:
        with pytest.raises(kind, match=str(failure)):
            await client.messages.create(model="m", max_tokens=9, messages=[QUESTION])
