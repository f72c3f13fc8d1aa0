"""What an engine refuses, in which words and with which status; it goes on serving afterwards."""

from typing import Any

import pytest
from engine_client import PROMPT, Engine, Started


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [5] * 2000}, "The input (2000 tokens) is longer than the model's context length (1024 tokens)."),
        ({"input_ids": [5] * 1000, "sampling_params": {"max_new_tokens": 100}}, "Requested token count exceeds"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature must be a non-negative finite"),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1], got 0"),
        ({"input_ids": PROMPT, "sampling_params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"input_ids": PROMPT, "sampling_params": {"min_p": 2}}, "min_p must be in [0, 1], got 2"),
        (
            {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 2}},
            "min_new_tokens must be in [0, max_new_tokens(2)], got 5.",
        ),
        ({"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 3}}, "frequency_penalty must be in [-2, 2]"),
        (
            {"input_ids": PROMPT, "sampling_params": {"logit_bias": {"7000": 1.0}}},
            "logit_bias must has keys in [0, 511]",
        ),
        ({"input_ids": [PROMPT, [5] * 2000]}, "The input (2000 tokens) is longer"),
        (
            {"input_ids": [PROMPT, PROMPT], "rid": ["a", "a"]},
            "Duplicate request IDs detected within the request: ['a']",
        ),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["a"]}, "The specified rids length mismatch with the batch_size"),
    ],
)
async def test_a_request_without_sense_is_refused_with_a_message(
    engine: Engine, body: dict[str, Any], message: str
) -> None:
    error = await engine.refused(**body)
    assert list(error) == ["error"]
    assert error["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"bogus": 1}, "unknown field `bogus`, expected one of `max_new_tokens`"),
        ({"temperature": "x"}, 'invalid type: string "x", expected f64'),
        ({"max_new_tokens": "x"}, 'invalid type: string "x", expected i64'),
        ({"max_new_tokens": 1.5}, "invalid type: floating point `1.5`, expected i64"),
    ],
)
async def test_a_sampling_parameter_of_the_wrong_shape_is_refused_with_a_string(
    engine: Engine, sampling: dict[str, Any], message: str
) -> None:
    error = await engine.refused(input_ids=PROMPT, sampling_params=sampling)
    assert list(error) == ["error"]
    assert error["error"].startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPT, "stream": "perhaps"},
        {"input_ids": ["a"]},
        {"input_ids": [1.5]},
        {"input_ids": "abc"},
        {"input_ids": PROMPT, "sampling_params": 3},
        {"input_ids": PROMPT, "rid": 3},
    ],
)
async def test_a_body_of_the_wrong_shape_is_refused_as_a_bad_request(engine: Engine, body: dict[str, Any]) -> None:
    error = await engine.refused(**body)
    assert error.keys() == {"object", "message", "type", "param", "code"}
    assert (error["object"], error["type"], error["code"]) == ("error", "Bad Request", 400)


@pytest.mark.parametrize("data", [b"{bad", b"[]", b""])
async def test_a_body_that_is_no_object_is_refused(engine: Engine, data: bytes) -> None:
    status, error = await engine.call("POST", "/generate", data=data)
    assert status == 400
    assert (error["object"], error["code"]) == ("error", 400)


@pytest.mark.parametrize("token", [-1, 512, 10**6])
async def test_a_token_outside_the_vocabulary_is_refused_and_kills_nobody(engine: Engine, token: int) -> None:
    if engine.kind == "sglang":
        pytest.skip("it does kill SGLang 0.5.23")
    error = await engine.refused(input_ids=[*PROMPT, token])
    assert error["error"]["message"] == f"Token id {token} is out of vocabulary: the model has ids 0 to 511."


async def test_a_rid_in_flight_may_not_be_used_again(engine: Engine) -> None:
    running = await engine.start(rid="taken")
    status, error = await engine.post("/generate", input_ids=PROMPT, rid="taken")
    assert (status, error) == (400, {"error": {"message": "Duplicate request ID detected: taken"}})
    assert running.is_running
    await engine.post("/abort_request", rid="taken")
    await running.end()
    assert (await engine.generate({"max_new_tokens": 1}, rid="taken"))["meta_info"]["id"] == "taken"


async def test_a_refused_stream_is_an_event(engine: Engine) -> None:
    events = [event async for event in engine.stream(input_ids=[])]
    error = {"message": "input_ids cannot be empty.", "type": "invalid_request_error", "code": 400, "retryable": False}
    assert events == [{"error": error}]


async def test_a_refused_item_refuses_its_batch(engine: Engine) -> None:
    running: Started = await engine.start(rid="other")
    await engine.refused(input_ids=[PROMPT, [5] * 2000], rid=["x", "y"])
    assert running.is_running
    assert (await engine.generate({"max_new_tokens": 1}, rid="x"))["meta_info"]["id"] == "x"


@pytest.mark.parametrize(
    "path",
    ["/pause_generation", "/continue_generation", "/abort_request", "/begin_weight_update", "/end_weight_update"],
)
async def test_control_needs_a_body(engine: Engine, path: str) -> None:
    status, error = await engine.call("POST", path)
    assert (status, error["object"], error["type"], error["code"]) == (400, "error", "Bad Request", 400)


async def test_unknown_paths_and_methods(engine: Engine) -> None:
    assert await engine.get("/nope") == (404, {"detail": "Not Found"})
    assert await engine.get("/generate") == (405, {"detail": "Method Not Allowed"})
    status, error = await engine.post("/pause_generation", mode="sometimes")
    assert (status, error["type"]) == (400, "Bad Request")
