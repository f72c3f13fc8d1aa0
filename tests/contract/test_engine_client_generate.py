"""A request, to SGLang or vLLM, brings tokens with log-probs and versions, and goes on over what interrupts it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fleet_harness import KINDS, V0, V1, Kind, Rig, check_evidence, eventually, request, rig_of, soon

from headway.core.routing import RoutingPolicy
from headway.core.trajectory import StopReason
from headway.errors import InvalidInput, StaleVersion, TimedOut
from headway.testing.scripted_engine import ScriptedEngine
from headway.testing.scripted_model import CONTEXT_LENGTH, EOS, VOCABULARY, count_up
from headway.workflow import GenerationHyperparameters, ModelRequest
from headway.workflow.errors import EvidenceInvalid, PromptTooLong, ServerLost

GENERATE = {"sglang": "/generate", "vllm": "/inference/v1/generate"}


@pytest.fixture(params=KINDS)
async def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
async def one(tmp_path: Path, kind: Kind) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, kind) as rig:
        yield rig


@pytest.fixture
async def two(tmp_path: Path, kind: Kind) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, kind, kind) as rig:
        yield rig


async def test_tokens_come_with_their_logprobs_and_versions(one: Rig) -> None:
    running = one.start(max_new_tokens=12)
    await soon(one.engines["0"].model.wait_for_requests(1))
    one.engines["0"].model.finish_all()
    response = await soon(running)
    check_evidence(response)
    assert (response.output_len, set(response.output_versions)) == (12, {0})
    assert (response.stop_reason, response.num_pieces) == (StopReason.LENGTH, 1)
    assert response.input_tokens == [5, 6, 7]


async def test_a_stop_token_ends_and_is_kept(one: Rig) -> None:
    model = one.engines["0"].model
    model.next_token = lambda request: EOS if len(request.ids) == 4 else count_up(request)
    running = one.start()
    await soon(model.wait_for_requests(1))
    model.finish_all()
    response = await soon(running)
    assert response.output_tokens[4:] == [EOS]
    assert response.stop_reason is StopReason.STOP


async def test_stop_ids_and_minimum_reach_the_engine(one: Rig) -> None:
    model = one.engines["0"].model
    running = one.start(stop_token_ids=[15], min_new_tokens=5, ignore_eos=True)
    await soon(model.wait_for_requests(1))
    model.finish_all()
    assert (await soon(running)).output_tokens == [13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


async def test_an_update_leaves_each_token_with_the_version_that_made_it(one: Rig) -> None:
    model = one.engines["0"].model
    running = one.start()
    await soon(model.wait_for_requests(1))
    model.advance(4)
    one.publish(V1)
    await soon(one.fleet.move_to(V1))
    await soon(model.wait_for_requests(1))
    model.finish_all()
    response = await soon(running)
    check_evidence(response)
    assert response.output_versions == [0] * 4 + [1] * 6


async def test_an_aborted_request_goes_on_with_what_is_left_of_its_budget(one: Rig, kind: Kind) -> None:
    engine = one.engines["0"]
    running = one.start(min_new_tokens=6)
    await soon(engine.model.wait_for_requests(1))
    engine.model.advance(4)
    engine.model.abort(engine.model.requests)
    await eventually(lambda: bool(engine.model.requests))
    engine.model.finish_all()
    response = await soon(running)
    check_evidence(response)
    assert (response.output_len, response.num_pieces) == (10, 2)
    second = engine.calls_of(GENERATE[kind])[1]
    names = ("max_new_tokens", "min_new_tokens") if kind == "sglang" else ("max_tokens", "min_tokens")
    assert [second["sampling_params"][name] for name in names] == [6, 2]
    assert second["input_ids" if kind == "sglang" else "token_ids"] == [5, 6, 7, 13, 14, 15, 16]


async def test_a_lost_server_is_continued_on_another_with_the_tokens_so_far(two: Rig) -> None:
    running = two.start(max_new_tokens=200)
    await eventually(lambda: any(engine.model.requests for engine in two.engines.values()))
    lost = two.holder()
    lost.model.advance(150)
    member = two.fleet._members["0" if two.engines["0"] is lost else "1"]
    await eventually(lambda: any(len(piece.ids) >= 128 for piece in member.server._open.values()))
    await lost.kill()
    other = two.other(lost)
    await soon(other.model.wait_for_requests(1))
    (continued,) = other.model.requests.values()
    assert continued.prompt[:3] == [5, 6, 7]
    assert len(continued.prompt) >= 3 + 128
    other.model.finish_all()
    response = await soon(running)
    check_evidence(response)
    assert response.output_len == 200


async def test_tokens_after_an_update_are_given_up_when_their_version_was_not_stated(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang", "sglang") as rig:
        running = rig.start(max_new_tokens=400)
        await eventually(lambda: any(engine.model.requests for engine in rig.engines.values()))
        lost = rig.holder()
        lost.model.advance(70)
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        lost.model.advance(100)
        name = "0" if rig.engines["0"] is lost else "1"
        pieces = rig.fleet._members[name].server._open
        await eventually(lambda: any(len(piece.ids) >= 128 for piece in pieces.values()))
        await lost.kill()
        other = rig.other(lost)
        await soon(other.model.wait_for_requests(1))
        other.model.finish_all()
        response = await soon(running)
        check_evidence(response)
        kept = response.output_versions.index(1)
        assert kept == 64, "the tokens that v1.0 is known to have made, and no more"


async def test_stop_strings_end_a_request(one: Rig) -> None:
    model = one.engines["0"].model
    running = one.start(stop=[chr(15) + chr(16)])
    await soon(model.wait_for_requests(1))
    model.finish_all()
    response = await soon(running)
    assert (response.output_tokens, response.stop_reason) == ([13, 14, 15, 16], StopReason.STOP)


def decoding(**gconfig: object) -> ModelRequest:
    class Decoder:
        def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(map(chr, ids))

    gconfig = {"max_new_tokens": 10, **gconfig}
    parameters = GenerationHyperparameters(**gconfig)  # type: ignore[arg-type]
    return ModelRequest(input_ids=[5, 6, 7], gconfig=parameters, tokenizer=Decoder())  # type: ignore[arg-type]


async def test_a_stop_string_that_straddles_an_interruption_ends_the_request(one: Rig) -> None:
    model = one.engines["0"].model
    running = asyncio.create_task(one.fleet.engine().agenerate(decoding(stop=[chr(15) + chr(16)])))
    await soon(model.wait_for_requests(1))
    model.advance(3)
    model.abort(model.requests)
    await eventually(lambda: bool(model.requests))
    model.finish_all()
    response = await soon(running)
    assert (response.output_tokens, response.stop_reason) == ([13, 14, 15, 16], StopReason.STOP)
    assert len(response.output_logprobs) == len(response.output_versions) == 4


async def test_a_server_without_a_tokenizer_is_sent_no_stop_strings(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path) as rig, ScriptedEngine(kind) as engine:
        engine.script.skip_tokenizer_init = True
        rig.join("0", engine)
        await rig.serving("0")
        running = asyncio.create_task(rig.fleet.engine().agenerate(decoding(stop=[chr(15)])))
        await soon(engine.model.wait_for_requests(1))
        assert next(iter(engine.model.requests.values())).stop == ()
        engine.model.finish_all()
        assert (await soon(running)).output_tokens == [13, 14, 15]


@pytest.mark.parametrize("stop", [chr(16), 16])
async def test_a_tool_call_is_told_from_other_stops(one: Rig, stop: str | int) -> None:
    model = one.engines["0"].model
    wanted = decoding()
    wanted.tool_call_stops = (stop,)
    running = asyncio.create_task(one.fleet.engine().agenerate(wanted))
    await soon(model.wait_for_requests(1))
    model.finish_all()
    response = await soon(running)
    assert (response.output_tokens[-1], response.stop_reason) == (16, StopReason.TOOL_CALLS)


async def test_the_callers_mistake_is_told_and_not_tried_again(one: Rig, kind: Kind) -> None:
    engine = one.engines["0"]
    engine.script.generate_errors = [(400, {"error": {"message": "temperature is silly"}})]
    with pytest.raises(InvalidInput, match="temperature is silly"):
        await soon(one.start())
    assert len(engine.calls_of(GENERATE[kind])) == 1
    assert one.fleet.snapshot().engines[0].requests_running == 0


@pytest.mark.parametrize("status", [503, 500])
async def test_a_busy_or_failing_server_is_tried_again(one: Rig, status: int) -> None:
    model = one.engines["0"].model
    one.engines["0"].script.generate_errors = [(status, {"message": "The request queue is full."})] * 2
    running = one.start()
    await soon(model.wait_for_requests(1))
    model.finish_all()
    assert (await soon(running)).output_len == 10


async def test_a_request_that_makes_no_progress_ends_with_the_reason(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, request_retries=1) as rig:
        rig.engines["0"].script.generate_errors = [(500, {"message": "out of memory"})] * 9
        with pytest.raises(ServerLost, match=r"2 tries in a row brought no token.*out of memory"):
            await soon(rig.start())
        assert len(rig.engines["0"].calls_of(GENERATE[kind])) == 2


async def test_ids_outside_the_vocabulary_never_reach_an_engine(one: Rig, kind: Kind) -> None:
    with pytest.raises(InvalidInput, match=f"from 5 to {VOCABULARY}; the model's vocabulary has {VOCABULARY}"):
        await soon(one.start([5, VOCABULARY]))
    with pytest.raises(InvalidInput, match="empty prompt"):
        await soon(one.start([]))
    assert one.engines["0"].calls_of(GENERATE[kind]) == []


async def test_a_prompt_that_fills_the_context_is_refused_before_it_is_sent(one: Rig, kind: Kind) -> None:
    with pytest.raises(PromptTooLong, match=f"the context {CONTEXT_LENGTH}"):
        await soon(one.start([5] * CONTEXT_LENGTH))
    with pytest.raises(PromptTooLong, match=r"gconfig\.max_tokens is 3"):
        await soon(one.start(max_tokens=3))
    assert one.engines["0"].calls_of(GENERATE[kind]) == []


async def test_the_budget_is_cut_to_the_context(one: Rig) -> None:
    model = one.engines["0"].model
    running = one.start([5] * (CONTEXT_LENGTH - 4), max_new_tokens=100)
    await soon(model.wait_for_requests(1))
    model.finish_all()
    response = await soon(running)
    assert (response.output_len, response.stop_reason) == (3, StopReason.LENGTH)


async def test_a_request_past_its_time_ends_here_and_at_the_server(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, request_timeout_s=0.2) as rig:
        with pytest.raises(TimedOut, match=r"longer than rollout\.request_timeout, 0\.2 s"):
            await soon(rig.start())
        await eventually(lambda: not rig.engines["0"].model.requests)
        assert rig.fleet.snapshot().engines[0].tokens_in_flight == 0


async def test_a_cancelled_request_leaves_nothing_running(one: Rig) -> None:
    model = one.engines["0"].model
    running = [one.start() for _ in range(3)]
    await soon(model.wait_for_requests(3))
    for task in running[1:]:
        task.cancel()
    await eventually(lambda: len(model.requests) == 1)
    model.finish_all()
    check_evidence(await soon(running[0]))


async def test_a_pinned_request_is_made_by_its_version_alone(one: Rig) -> None:
    model = one.engines["0"].model
    engine = one.fleet.engine(pinned=V0)
    assert engine.get_version() == 0
    running = asyncio.create_task(engine.agenerate(request()))
    await soon(model.wait_for_requests(1))
    model.finish_all()
    assert set((await soon(running)).output_versions) == {0}


async def test_a_pin_that_was_passed_is_told_rather_than_waited_for(one: Rig) -> None:
    one.publish(V1)
    await soon(one.fleet.move_to(V1))
    with pytest.raises(StaleVersion, match=r"pinned to v1\.0, but v1\.1 was published"):
        await soon(one.fleet.engine(pinned=V0).agenerate(request()))


async def test_a_pinned_request_that_another_version_went_on_with_is_refused(one: Rig) -> None:
    model = one.engines["0"].model
    running = asyncio.create_task(one.fleet.engine(pinned=V0).agenerate(request()))
    await soon(model.wait_for_requests(1))
    model.advance(3)
    model.label = "v1.1"
    one.publish(V1)
    one.fleet._known[V1] = None
    model.finish_all()
    with pytest.raises(EvidenceInvalid, match=r"v1\.1 made tokens of a request that is pinned to v1\.0"):
        await soon(running)


async def test_requests_of_a_group_go_to_one_server(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind, policy=RoutingPolicy.PREFIX_AFFINITY) as rig:
        groups = [[rig.start([20 + group, 6, 7]) for _ in range(4)] for group in range(2)]
        models = [engine.model for engine in rig.engines.values()]
        await eventually(lambda: sum(len(model.requests) for model in models) == 8)
        prompts = [{tuple(held.prompt) for held in model.requests.values()} for model in models]
        assert sorted(map(len, prompts)) == [1, 1]
        for model in models:
            model.finish_all()
        await soon(asyncio.gather(*groups[0], *groups[1]))


async def test_request_ids_have_one_length_and_no_prefix_of_another(one: Rig) -> None:
    model = one.engines["0"].model
    running = [one.start() for _ in range(20)]
    await soon(model.wait_for_requests(20))
    rids = list(model.requests)
    assert {len(rid) for rid in rids} == {32}
    assert len(set(rids)) == 20
    model.finish_all()
    await soon(asyncio.gather(*running))
