"""What only SGLang's stream does: batches by index, cumulative and incremental events, and a repeated end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fleet_harness import Rig, check_evidence, eventually, rig_of, soon

from headway.errors import InvalidInput
from headway.testing.scripted_engine import ScriptedEngine
from headway.testing.scripted_model import Pause


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, "sglang") as rig:
        yield rig


def engine_of(rig: Rig) -> ScriptedEngine:
    return rig.engines["0"]


async def test_requests_of_one_tick_travel_as_one_call_and_end_each_on_its_own(one: Rig) -> None:
    engine = engine_of(one)
    running = [one.start(max_new_tokens=budget) for budget in (3, 8, 8)]
    await soon(engine.model.wait_for_requests(3))
    engine.model.advance(3)
    check_evidence(await soon(running[0]))
    assert not running[1].done()
    engine.model.finish_all()
    for response in await soon(asyncio.gather(*running)):
        check_evidence(response)
    (call,) = engine.calls_of("/generate")
    assert [parameters["max_new_tokens"] for parameters in call["sampling_params"]] == [3, 8, 8]


async def test_equal_sampling_is_sent_once(one: Rig) -> None:
    engine = engine_of(one)
    running = [one.start() for _ in range(4)]
    await soon(engine.model.wait_for_requests(4))
    engine.model.finish_all()
    await soon(asyncio.gather(*running))
    (call,) = engine.calls_of("/generate")
    assert call["sampling_params"]["max_new_tokens"] == 10
    assert len(call["input_ids"]) == 4


async def test_one_refused_request_does_not_spoil_its_batch(one: Rig) -> None:
    engine = engine_of(one)
    engine.script.generate_errors = [(400, {"error": {"message": "one of you is wrong"}})] * 2
    running = [one.start() for _ in range(3)]
    await soon(engine.model.wait_for_requests(2))
    engine.model.finish_all()
    results = await soon(asyncio.gather(*running, return_exceptions=True))
    refused = [result for result in results if isinstance(result, InvalidInput)]
    assert len(refused) == 1
    for result in results:
        if not isinstance(result, BaseException):
            check_evidence(result)


async def test_an_error_inside_the_stream_is_told_like_any_other(one: Rig) -> None:
    error = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}}
    engine_of(one).script.edit_event = lambda event: error
    running = one.start()
    await soon(engine_of(one).model.wait_for_requests(1))
    engine_of(one).model.finish_all()
    with pytest.raises(InvalidInput, match="too long"):
        await soon(running)


async def test_an_incremental_stream_brings_the_same_tokens(one: Rig) -> None:
    engine = engine_of(one)
    engine.script.is_incremental = True
    running = one.start(max_new_tokens=300)
    await soon(engine.model.wait_for_requests(1))
    engine.model.finish_all()
    response = await soon(running)
    check_evidence(response)
    assert response.output_len == 300


async def test_an_incremental_stream_that_repeats_its_end_is_counted_once(one: Rig) -> None:
    engine = engine_of(one)
    engine.script.is_incremental = True
    running = one.start(max_new_tokens=100)
    await soon(engine.model.wait_for_requests(1))
    engine.model.advance(70)
    open_pieces = one.fleet._members["0"].server._open
    await eventually(lambda: any(len(piece.ids) == 64 for piece in open_pieces.values()))
    engine.model.hold(Pause.RETRACT)
    engine.model.abort(engine.model.requests)
    engine.model.resume()
    await soon(engine.model.wait_for_requests(1))
    engine.model.finish_all()
    response = await soon(running)
    check_evidence(response)
    assert (response.output_len, response.num_pieces) == (100, 2)


async def test_hundreds_of_requests_come_back_each_with_its_own(one: Rig) -> None:
    engine = engine_of(one)
    running = [one.start([5, 6, 7 + number]) for number in range(400)]
    await soon(engine.model.wait_for_requests(400))
    engine.model.finish_all()
    responses = await soon(asyncio.gather(*running))
    for number, response in enumerate(responses):
        assert response.input_tokens == [5, 6, 7 + number]
        check_evidence(response)
    assert len(engine.calls_of("/generate")) == 2
