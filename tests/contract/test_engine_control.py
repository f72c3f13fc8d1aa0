"""Abort, pause, continue, flush: what becomes of requests in flight, and what their clients get."""

import asyncio
from typing import Any

import pytest
from engine_client import LONG, PROMPT, Engine

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


def assert_evidence(result: Any) -> None:
    """As many log-probabilities and versions as tokens."""
    meta, count = result["meta_info"], len(result["output_ids"])
    assert meta["completion_tokens"] == count == len(meta["output_token_logprobs"])
    assert meta["weight_versions"][0]["start"] == 0
    assert meta["weight_versions"][-1]["end"] == count


async def test_an_aborted_request_returns_all_its_tokens(engine: Engine) -> None:
    running = await engine.start(rid="one")
    await running.tokens(10)
    assert await engine.post("/abort_request", rid="one") == (200, "")
    result = await running.end()
    assert result["meta_info"]["finish_reason"] == ABORTED
    assert 10 <= len(result["output_ids"]) < 900
    assert_evidence(result)


async def test_an_aborted_request_without_a_stream_returns_all_its_tokens(engine: Engine) -> None:
    plain = asyncio.create_task(engine.generate(LONG, rid="plain"))
    other = await engine.start(rid="other")
    await other.tokens(20)
    await engine.post("/abort_request", abort_all=True)
    result = await plain
    assert result["meta_info"]["finish_reason"] == ABORTED
    assert len(result["output_ids"]) >= 15
    assert_evidence(result)


async def test_one_of_a_batch_can_be_aborted(engine: Engine) -> None:
    both = asyncio.create_task(
        engine.generate({"max_new_tokens": 300, "ignore_eos": True}, input_ids=[PROMPT] * 2, rid="b")
    )
    other = await engine.start(rid="other")
    await other.tokens(10)
    await engine.post("/abort_request", rid="b_1")
    results = await both
    assert [result["meta_info"]["finish_reason"]["type"] for result in results] == ["length", "abort"]
    await engine.post("/abort_request", rid="other")
    await other.end()


async def test_an_abort_takes_along_every_rid_that_begins_with_its_own(engine: Engine) -> None:
    first, longer = await engine.start(rid="x1"), await engine.start(rid="x10")
    await engine.post("/abort_request", rid="x")  # nobody is called so: ignored
    await first.tokens(first.count + 3)
    await engine.post("/abort_request", rid="x1")
    assert (await first.end())["meta_info"]["finish_reason"] == ABORTED
    assert (await longer.end())["meta_info"]["finish_reason"] == ABORTED


async def test_aborting_nobody_is_fine(engine: Engine) -> None:
    assert await engine.post("/abort_request", rid="nobody") == (200, "")
    assert await engine.post("/abort_request") == (200, "")


async def test_a_client_that_goes_away_ends_its_request(engine: Engine) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(LONG, rid="gone"), 0.3)
    status, _ = await engine.get("/flush_cache?timeout=20")
    assert status == 200


async def test_pause_abort_ends_what_runs_and_holds_what_comes(engine: Engine) -> None:
    running = await engine.start()
    assert await engine.post("/pause_generation") == (200, PAUSED)
    result = await running.end()
    assert result["meta_info"]["finish_reason"] == ABORTED
    assert_evidence(result)
    held = asyncio.create_task(engine.generate({"max_new_tokens": 2, "ignore_eos": True}))
    assert (await engine.get("/ready"))[0] == 503
    assert (await engine.post("/flush_cache"))[0] == 200
    assert not held.done()
    assert await engine.post("/continue_generation") == (200, CONTINUED)
    assert len((await held)["output_ids"]) == 2
    assert (await engine.get("/ready"))[0] == 200


async def test_pause_retract_frees_the_cache_and_goes_on_afterwards(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 120, "ignore_eos": True})
    assert await engine.post("/pause_generation", mode="retract") == (200, PAUSED)
    assert running.is_running
    before = running.count
    assert (await engine.post("/flush_cache"))[0] == 200
    assert await engine.post("/continue_generation") == (200, CONTINUED)
    result = await running.end()
    assert len(result["output_ids"]) == 120 > before
    assert result["meta_info"]["num_retractions"] == 1
    assert_evidence(result)


async def test_pause_in_place_keeps_the_cache(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 120, "ignore_eos": True})
    assert await engine.post("/pause_generation", mode="in_place") == (200, PAUSED)
    assert await engine.post("/flush_cache") == (400, "Flush cache failed.\n")
    await engine.post("/continue_generation")
    result = await running.end()
    assert len(result["output_ids"]) == 120
    assert result["meta_info"]["num_retractions"] == 0
    assert_evidence(result)


async def test_greedy_output_is_the_same_through_a_retraction(engine: Engine) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    straight = await engine.generate(greedy)
    running = await engine.start(greedy)
    await engine.post("/pause_generation", mode="retract")
    await engine.post("/flush_cache")
    await engine.post("/continue_generation")
    assert (await running.end())["output_ids"] == straight["output_ids"]


async def test_an_abort_in_a_retract_pause_keeps_what_the_stream_has_shown(engine: Engine) -> None:
    running = await engine.start(rid="r")
    await running.tokens(10)
    await engine.post("/pause_generation", mode="retract")
    shown = running.count
    await engine.post("/abort_request", rid="r")
    result = await running.end()
    assert result["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert len(result["output_ids"]) == result["meta_info"]["completion_tokens"] >= shown
    await engine.post("/continue_generation")


async def test_an_abort_in_an_in_place_pause_comes_with_the_continuation(engine: Engine) -> None:
    running = await engine.start(rid="r")
    await engine.post("/pause_generation", mode="in_place")
    await engine.post("/abort_request", rid="r")
    assert running.is_running
    await engine.post("/continue_generation")
    result = await running.end()
    assert result["meta_info"]["finish_reason"] == ABORTED
    assert_evidence(result)


async def test_a_flush_waits_for_idleness_if_asked_to(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 200, "ignore_eos": True})
    assert await engine.post("/flush_cache") == (400, "Flush cache failed.\n")
    status, text = await engine.get("/flush_cache?timeout=30")
    assert status == 200
    assert text.startswith("Cache flushed.\n")
    await running.end()


async def test_requests_join_and_leave_while_others_run(engine: Engine) -> None:
    running = await engine.start()
    short = await asyncio.gather(*(engine.generate({"max_new_tokens": 3, "ignore_eos": True}) for _ in range(5)))
    assert [len(result["output_ids"]) for result in short] == [3] * 5
    assert running.is_running


async def test_more_requests_than_slots_wait_their_turn(engine: Engine) -> None:
    prompts = [[token, token + 1] for token in range(100, 250)]
    results = await engine.generate({"max_new_tokens": 5, "ignore_eos": True}, input_ids=prompts)
    assert [len(result["output_ids"]) for result in results] == [5] * 150


async def test_the_engine_answers_while_it_generates(engine: Engine) -> None:
    running = await engine.start()
    async with asyncio.timeout(20):
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.get("/ready"))[0] == 200
    assert running.is_running or running.count == 900


async def test_a_request_that_never_ran_ends_with_no_tokens_and_leaves_its_batch_alone(engine: Engine) -> None:
    """More requests in one call than run at once; the last ones are ended while they wait."""
    rids = [f"batch-{number:03d}" for number in range(80)]
    events = engine.stream(LONG, input_ids=[PROMPT] * len(rids), rid=rids)
    ended, has_aborted = {}, False
    async with asyncio.timeout(60):
        async for event in events:
            if not has_aborted:
                has_aborted = True
                assert (await engine.post("/abort_request", abort_all=True))[0] == 200
            if event["meta_info"]["finish_reason"] is not None:
                ended[event["index"]] = event
    assert len(ended) == len(rids)
    never_ran = [event for event in ended.values() if not event["output_ids"]]
    assert never_ran
    assert {event["meta_info"]["finish_reason"]["type"] for event in never_ran} == {"abort"}
