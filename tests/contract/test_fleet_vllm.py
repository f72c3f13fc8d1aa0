"""What only vLLM does is hidden, or refused where it cannot be: what its log-probs mean, its ids, its pauses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fleet_harness import V1, Rig, check_evidence, eventually, rig_of, soon

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.testing.scripted_engine import ScriptedEngine
from headway.testing.scripted_model import Pause


async def generate(mode: str, tmp_path: Path, **gconfig: Any) -> None:
    """One request to a vLLM that reports such log-probs."""
    async with rig_of(tmp_path) as rig, ScriptedEngine("vllm") as engine:
        engine.script.logprobs_mode = mode
        rig.join("0", engine)
        await rig.serving("0")
        running = rig.start(**gconfig)
        arrived = asyncio.ensure_future(engine.model.wait_for_requests(1))
        await soon(asyncio.wait({running, arrived}, return_when=asyncio.FIRST_COMPLETED))
        arrived.cancel()
        engine.model.finish_all()
        check_evidence(await soon(running))


@pytest.mark.parametrize(
    ("mode", "gconfig"),
    [
        ("processed_logprobs", {"temperature": 0.7}),
        ("processed_logprobs", {"temperature": 0.7, "frequency_penalty": 0.5}),
        ("raw_logprobs", {"temperature": 1.0, "top_p": 0.9}),
        ("raw_logprobs", {"greedy": True}),
        ("", {"temperature": 1.0}),
    ],
)
async def test_logprobs_that_mean_the_policys_own_are_taken(mode: str, gconfig: dict[str, Any], tmp_path: Path) -> None:
    await generate(mode, tmp_path, **gconfig)


@pytest.mark.parametrize(
    ("mode", "gconfig"),
    [
        ("raw_logprobs", {"temperature": 0.7}),
        ("raw_logprobs", {"frequency_penalty": 0.5}),
        ("processed_logprobs", {"top_p": 0.9}),
        ("processed_logprobs", {"top_k": 5}),
        ("processed_logits", {"temperature": 0.7}),
        ("", {"top_p": 0.9}),
    ],
)
async def test_logprobs_that_mean_something_else_are_refused(
    mode: str, gconfig: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="Start vLLM with `logprobs_mode: processed_logprobs`"):
        await generate(mode, tmp_path, **gconfig)


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, "vllm") as rig:
        yield rig


async def test_a_request_is_aborted_under_the_id_that_vllm_gives_it(one: Rig) -> None:
    engine = one.engines["0"]
    running = one.start()
    await soon(engine.model.wait_for_requests(1))
    (rid,) = engine.model.requests
    running.cancel()
    await eventually(lambda: not engine.model.requests)
    assert {"request_ids": [f"generate-tokens-{rid}"]} in engine.calls_of("/abort_requests")


async def test_requests_that_a_pause_ended_are_sent_again_and_not_refused(one: Rig) -> None:
    engine = one.engines["0"]
    engine.script.rejects_in_pause = True
    running = [one.start() for _ in range(3)]
    await soon(engine.model.wait_for_requests(3))
    engine.model.advance(3)
    one.publish(V1)
    await soon(one.fleet.move_to(V1))
    await soon(engine.model.wait_for_requests(3))
    assert engine.model.pause is Pause.NONE
    engine.model.finish_all()
    for response in await soon(asyncio.gather(*running)):
        check_evidence(response)
        assert (response.output_versions, response.num_pieces) == ([0] * 3 + [1] * 7, 2)


async def test_updates_in_a_row_do_not_use_up_a_requests_tries(tmp_path: Path) -> None:
    """A request that got no token before each of them has not failed."""
    async with rig_of(tmp_path, "vllm", request_retries=1) as rig:
        running = rig.start()
        for step in range(1, 5):
            await soon(rig.engines["0"].model.wait_for_requests(1))
            version = PolicyVersion(1, step)
            rig.publish(version)
            await soon(rig.fleet.move_to(version))
        await soon(rig.engines["0"].model.wait_for_requests(1))
        rig.engines["0"].model.finish_all()
        response = await soon(running)
    assert set(response.output_versions) == {4}
