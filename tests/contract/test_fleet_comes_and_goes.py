"""Servers come and go at any time: requests go on within 3 s, who is well again gets traffic, and waits have names."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fleet_harness import KINDS, V1, Kind, check_evidence, eventually, rig_of, soon

from headway.errors import InvalidInput
from headway.testing.fault_proxy import FaultProxy
from headway.testing.scripted_engine import ScriptedEngine
from services.rollout_controller import fleet_member
from services.rollout_controller.fleet_member import EngineState

PATIENCE_S = fleet_member.FIRST_PATIENCE_S


def test_a_lost_server_is_noticed_within_three_seconds() -> None:
    assert fleet_member.PROBE_S + fleet_member.FIRST_PATIENCE_S < 3.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def proxy_of(engine: ScriptedEngine) -> FaultProxy:
    address = urlsplit(engine.url)
    return FaultProxy("127.0.0.1", address.port or 0)


async def test_requests_of_a_killed_server_go_on_elsewhere(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind) as rig:
        running = [rig.start() for _ in range(6)]
        models = [engine.model for engine in rig.engines.values()]
        await eventually(lambda: sum(len(model.requests) for model in models) == 6)
        await rig.engines["0"].kill()
        await soon(rig.engines["1"].model.wait_for_requests(6))
        rig.engines["1"].model.finish_all()
        for response in await soon(asyncio.gather(*running)):
            check_evidence(response)
        assert rig.in_state(EngineState.SILENT) == ["0"]


async def test_requests_of_a_frozen_server_go_on_elsewhere(tmp_path: Path, kind: Kind) -> None:
    async with (
        rig_of(tmp_path, patience_s=PATIENCE_S) as rig,
        ScriptedEngine(kind) as frozen,
        ScriptedEngine(kind) as other,
    ):
        async with proxy_of(frozen) as proxy:
            rig.join("frozen", frozen, proxy.url)
            await rig.serving("frozen")
            running = rig.start()
            await soon(frozen.model.wait_for_requests(1))
            rig.join("other", other)
            await rig.serving("frozen", "other")
            proxy.freeze()
            await soon(other.model.wait_for_requests(1))
            other.model.finish_all()
            check_evidence(await soon(running))
            proxy.heal()
            await rig.serving("frozen", "other")
            await eventually(lambda: not frozen.model.requests)


async def test_a_server_that_was_only_slow_is_given_more_time(tmp_path: Path) -> None:
    async with rig_of(tmp_path, patience_s=0.1) as rig, ScriptedEngine() as slow, proxy_of(slow) as proxy:
        rig.join("slow", slow, proxy.url)
        await rig.serving("slow")
        proxy.delay_s = 0.2
        await eventually(lambda: rig.in_state(EngineState.SILENT) == ["slow"])
        await rig.serving("slow")
        assert rig.fleet._members["slow"]._patience_s >= 0.2


async def test_a_frozen_server_without_another_keeps_its_requests(tmp_path: Path) -> None:
    async with rig_of(tmp_path, patience_s=0.5) as rig, ScriptedEngine() as only, proxy_of(only) as proxy:
        rig.join("only", only, proxy.url)
        await rig.serving("only")
        running = rig.start()
        await soon(only.model.wait_for_requests(1))
        proxy.freeze()
        await eventually(lambda: rig.in_state(EngineState.SILENT) == ["only"])
        proxy.heal()
        only.model.finish_all()
        response = await soon(running)
        check_evidence(response)
        assert response.num_pieces == 1


async def test_a_connection_that_breaks_costs_a_piece_not_a_request(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path) as rig, ScriptedEngine(kind) as only, proxy_of(only) as proxy:
        rig.join("only", only, proxy.url)
        await rig.serving("only")
        running = rig.start()
        await soon(only.model.wait_for_requests(1))
        only.model.advance(2)
        proxy.cut()
        await eventually(lambda: any(not request.ids for request in only.model.requests.values()))
        only.model.finish_all()
        check_evidence(await soon(running))


async def test_a_restarted_server_gets_traffic_again(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind) as rig:
        engine = rig.engines["0"]
        running = rig.start()
        await soon(engine.model.wait_for_requests(1))
        await engine.kill()
        await eventually(lambda: rig.fleet.snapshot().requests_waiting == 1)
        waits = [wait.what for wait in rig.waits.snapshot()]
        assert waits == ["an inference server that may take requests"]
        await engine.start()
        await soon(engine.model.wait_for_requests(1))
        engine.model.finish_all()
        check_evidence(await soon(running))
        assert rig.waits.snapshot() == []


async def test_a_server_whose_lease_is_gone_ends_what_it_has_and_takes_nothing_new(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind) as rig:
        running = rig.start()
        await eventually(lambda: any(engine.model.requests for engine in rig.engines.values()))
        leaver = rig.holder()
        stayer = rig.other(leaver)
        rig.fleet.remove("0" if rig.engines["0"] is leaver else "1")
        later = [rig.start() for _ in range(3)]
        await soon(stayer.model.wait_for_requests(3))
        leaver.model.finish_all()
        stayer.model.finish_all()
        for response in await soon(asyncio.gather(running, *later)):
            check_evidence(response)
            assert response.num_pieces == 1
        await eventually(lambda: len(rig.fleet.snapshot().engines) == 1)


async def test_a_server_that_leaves_by_dying_loses_nothing(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind) as rig:
        running = rig.start()
        await eventually(lambda: any(engine.model.requests for engine in rig.engines.values()))
        leaver = rig.holder()
        stayer = rig.other(leaver)
        rig.fleet.remove("0" if rig.engines["0"] is leaver else "1")
        await leaver.kill()
        await soon(stayer.model.wait_for_requests(1))
        stayer.model.finish_all()
        check_evidence(await soon(running))


async def test_a_server_that_comes_back_under_its_name_replaces_itself(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind) as rig, ScriptedEngine(kind) as successor:
        running = rig.start()
        old = rig.engines["0"]
        await soon(old.model.wait_for_requests(1))
        rig.join("0", successor)
        await eventually(lambda: rig.in_state(EngineState.SERVING) == ["0"])
        later = rig.start()
        await soon(successor.model.wait_for_requests(1))
        for engine in (old, successor):
            engine.model.finish_all()
        await soon(asyncio.gather(running, later))


async def test_a_server_that_says_it_is_not_ready_gets_nothing(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind) as rig:
        rig.engines["0"].script.is_ready = False
        await rig.serving("1")
        rig.engines["0"].script.is_ready = True
        await rig.serving("0", "1")


async def test_an_engine_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    async with rig_of(tmp_path) as rig:
        with pytest.raises(InvalidInput, match="known engines are builtin, sglang, vllm"):
            rig.fleet.add("0", "http://127.0.0.1:1", "tgi")


async def test_keys_go_to_the_routes_that_ask_for_them(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang", api_key="secret", admin_key="boss") as rig:
        engine = rig.engines["0"]
        running = rig.start()
        await soon(engine.model.wait_for_requests(1))
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        engine.model.finish_all()
        await soon(running)
        assert engine.keys["/generate"] == engine.keys["/model_info"] == "Bearer secret"
        assert engine.keys["/pause_generation"] == engine.keys["/update_weights_from_disk"] == "Bearer boss"
