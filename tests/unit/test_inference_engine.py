"""The engine's thread: same seed, same tokens, whatever happens beside; broken weights harm nobody for good."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from services.inference.builtin import BuiltinEngine, BuiltinSettings, start_builtin
from services.inference.engine import EngineSettings
from services.inference.parameters import SamplingParams
from services.inference.rows import Progress, Request
from services.inference.tiny_model import save_tiny_model

NONE: frozenset[int] = frozenset()


@pytest.fixture
async def builtin(tmp_path: Path) -> AsyncIterator[BuiltinEngine]:
    engine = EngineSettings(max_running_requests=4, prefill_tokens=16)
    async with start_builtin(BuiltinSettings(save_tiny_model(tmp_path / "model"), engine=engine, seed=0)) as started:
        yield started


def ask(builtin: BuiltinEngine, seeds: Sequence[int], prompt: Sequence[int] = (5, 6, 7)) -> list[Any]:
    """Start a request for each seed; the futures of their ends."""
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[Progress]] = [loop.create_future() for _ in seeds]
    params = SamplingParams(max_new_tokens=20)
    builtin.engine.submit(
        [
            Request(str(seed), [*prompt], params, NONE, NONE, seed, False, end.set_result)
            for seed, end in zip(seeds, ends, strict=True)
        ]
    )
    return ends


async def test_the_same_seed_gives_the_same_tokens_in_any_company(builtin: BuiltinEngine) -> None:
    alone = [await ask(builtin, [seed])[0] for seed in range(8)]
    together = await asyncio.gather(*ask(builtin, range(8)))
    assert [progress.output_ids for progress in alone] == [progress.output_ids for progress in together]
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert len({tuple(progress.output_ids) for progress in alone}) == 8


async def test_a_retraction_changes_no_token(builtin: BuiltinEngine) -> None:
    straight = await asyncio.gather(*ask(builtin, range(4)))
    ends = ask(builtin, range(4))
    await builtin.engine.call(partial(builtin.engine.pause, "retract"))
    assert await builtin.engine.call(builtin.engine.flush_cache)
    await builtin.engine.call(builtin.engine.resume)
    again = await asyncio.gather(*ends)
    assert [progress.output_ids for progress in again] == [progress.output_ids for progress in straight]


async def test_the_same_calls_give_the_same_bits(builtin: BuiltinEngine) -> None:
    results = []
    for _ in range(2):
        await builtin.engine.call(builtin.engine.flush_cache)
        results.append(await asyncio.gather(*ask(builtin, range(4))))
    assert [progress.logprobs for progress in results[0]] == [progress.logprobs for progress in results[1]]


async def test_broken_weights_end_requests_and_good_ones_heal_the_engine(builtin: BuiltinEngine) -> None:
    before = await ask(builtin, [1])[0]
    norm = builtin.engine.model.model.model.layers[0].input_layernorm.weight
    good = norm.clone()
    await builtin.engine.call(partial(set_to, builtin, norm, torch.full_like(good, torch.nan)))
    broken = await ask(builtin, [1])[0]
    assert broken.finish["type"] == "abort"
    assert broken.finish["status_code"] == 500
    await builtin.engine.call(partial(set_to, builtin, norm, good))
    assert (await ask(builtin, [1])[0]).output_ids == before.output_ids


def set_to(builtin: BuiltinEngine, parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter.copy_(value)
    builtin.engine.weights_changed()


async def test_an_error_in_the_thread_reaches_who_waits_for_it(builtin: BuiltinEngine) -> None:
    builtin.engine._inbox.put(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await builtin.engine.wait()


async def test_an_error_of_a_call_reaches_its_caller_only(builtin: BuiltinEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        await builtin.engine.call(lambda: 1 / 0)
    assert len((await ask(builtin, [1])[0]).output_ids) == 20
