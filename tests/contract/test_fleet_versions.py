"""Every server is moved to a published version and proves it, or takes no requests; no pause is longer than needed."""

import asyncio
from pathlib import Path

import pytest
from fleet_harness import KINDS, V0, V1, V2, Kind, check_evidence, eventually, rig_of, soon

from headway.errors import TimedOut
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.testing.scripted_engine import ScriptedEngine
from headway.testing.scripted_model import Pause
from services.rollout_controller import fleet_member
from services.rollout_controller.fleet import Fleet, FleetOptions
from services.rollout_controller.fleet_member import EngineState


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


async def test_a_new_version_reaches_every_server(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind, kind) as rig:
        folder = rig.publish(V1)
        report = await soon(rig.fleet.move_to(V1))
        assert (report.num_moved, report.num_out) == (3, 0)
        assert rig.fleet.served_step == 1
        for engine in rig.engines.values():
            assert (engine.model.label, engine.model_path) == ("v1.1", str(folder))
            assert engine.model.pause is Pause.NONE
        update = rig.fleet.snapshot().engines[0].last_update
        assert update is not None
        assert 0 < update.load_s <= update.pause_s <= report.total_s


async def test_sglang_is_retracted_loaded_verified_and_continued(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        folder, calls = rig.publish(V1), rig.engines["0"].calls
        calls.clear()
        await soon(rig.fleet.move_to(V1))
        assert calls[:4] == [
            ("/pause_generation", {"mode": "retract"}),
            (
                "/update_weights_from_disk",
                {"model_path": str(folder), "weight_version": "v1.1", "flush_cache": True},
            ),
            ("/model_info", None),
            ("/continue_generation", {}),
        ]


async def test_vllm_is_paused_by_abort_reloaded_named_verified_and_resumed(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "vllm") as rig:
        folder, calls = rig.publish(V1), rig.engines["0"].calls
        calls.clear()
        await soon(rig.fleet.move_to(V1))
        assert calls[:5] == [
            ("/pause", None),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
            ("/update_weight_version", {"new_version": "v1.1"}),
            ("/weight_info", None),
            ("/resume", None),
        ]


async def test_no_health_check_during_a_pause(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        rig.engines["0"].script.update = "hang"
        rig.publish(V1)
        moving = asyncio.create_task(rig.fleet.move_to(V1))
        await eventually(lambda: bool(rig.engines["0"].calls_of("/update_weights_from_disk")))
        await asyncio.sleep(2 * fleet_member.PROBE_S)
        assert rig.engines["0"].calls_of("/health") == []
        moving.cancel()


async def test_weights_that_were_updated_but_not_flushed_are_updated(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        engine = rig.engines["0"]
        engine.script.update = "not_flushed"
        rig.publish(V1)
        report = await soon(rig.fleet.move_to(V1))
        assert (report.num_moved, engine.model.label) == (1, "v1.1")
        assert len(engine.calls_of("/flush_cache")) == 1
        assert len(engine.calls_of("/update_weights_from_disk")) == 1


@pytest.mark.parametrize("update", ["fail", "lie", "hang"])
async def test_a_server_that_fails_to_update_is_taken_out_not_resumed_and_its_requests_go_on(
    tmp_path: Path, kind: Kind, update: str
) -> None:
    async with rig_of(tmp_path, kind, kind, update_timeout_s=0.3) as rig:
        running = rig.start(max_new_tokens=8)
        await eventually(lambda: any(engine.model.requests for engine in rig.engines.values()))
        bad = rig.holder()
        good = rig.other(bad)
        bad.script.update = update  # type: ignore[assignment]
        rig.publish(V1)
        report = await soon(rig.fleet.move_to(V1))
        assert (report.num_moved, report.num_out) == (1, 1)
        assert bad.model.pause is not Pause.NONE
        assert bad.calls_of("/continue_generation" if kind == "sglang" else "/resume") == []
        await soon(good.model.wait_for_requests(1))
        good.model.finish_all()
        check_evidence(await soon(running))
        (failed,) = [engine for engine in rig.fleet.snapshot().engines if engine.state is EngineState.FAILED]
        assert bad.url in failed.last_error


async def test_a_server_that_failed_comes_back_when_it_takes_the_weights(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_member, "FIRST_RETRY_S", 0.02)
    async with rig_of(tmp_path, kind) as rig:
        engine = rig.engines["0"]
        engine.script.update = "fail"
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        assert rig.fleet.served_step is None
        running = rig.start()
        engine.script.update = "ok"
        await rig.serving("0")
        await soon(engine.model.wait_for_requests(1))
        engine.model.finish_all()
        check_evidence(await soon(running))


async def test_waves_leave_the_other_servers_serving(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind, kind, max_unavailable=1) as rig:
        most = 0
        unwatched = rig.fleet.on_member_change

        def watched(member: fleet_member.Member) -> None:
            nonlocal most
            unwatched(member)
            most = max(most, len(rig.in_state(EngineState.UPDATING)))

        rig.fleet.on_member_change = watched  # type: ignore[method-assign]
        rig.publish(V1)
        report = await soon(rig.fleet.move_to(V1))
        assert (report.num_moved, most) == (3, 1)


async def test_the_fleet_serves_a_step_when_all_open_servers_do(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang", "sglang", max_unavailable=1) as rig:
        rig.engines["1"].script.update = rig.engines["0"].script.update = "hang"
        waiting = asyncio.create_task(rig.fleet.wait_for_step(1))
        rig.publish(V1)
        moving = asyncio.create_task(rig.fleet.move_to(V1))
        await eventually(lambda: len(rig.in_state(EngineState.UPDATING)) == 1)
        assert rig.fleet.served_step == 0
        assert not waiting.done()
        assert "the inference servers to serve step 1" in [wait.what for wait in rig.waits.snapshot()]
        moving.cancel()
        waiting.cancel()


async def test_the_newest_of_two_versions_wins(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, kind) as rig:
        rig.publish(V1)
        rig.publish(V2)
        await soon(asyncio.gather(rig.fleet.move_to(V1), rig.fleet.move_to(V2)))
        assert {engine.model.label for engine in rig.engines.values()} == {"v1.2"}
        assert rig.fleet.served_step == 2


async def test_an_older_version_is_never_moved_to(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        report = await soon(rig.fleet.move_to(V0))
        assert (report.num_moved, rig.engines["0"].model.label) == (1, "v1.1")


async def test_a_folder_that_is_not_there_yet_is_waited_for_before_anything_is_paused(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        moving = asyncio.create_task(rig.fleet.move_to(V1))
        await asyncio.sleep(0.1)
        assert rig.engines["0"].calls_of("/pause_generation") == []
        rig.publish(V1)
        assert (await soon(moving)).num_moved == 1


async def test_a_joiner_with_other_weights_serves_only_after_it_has_the_published_ones(
    tmp_path: Path, kind: Kind
) -> None:
    async with rig_of(tmp_path, kind) as rig, ScriptedEngine(kind, label="default") as joiner:
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        rig.join("joiner", joiner)
        await rig.serving("0", "joiner")
        assert joiner.model.label == "v1.1"


async def test_a_joiner_that_has_the_version_is_not_disturbed(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind) as rig:
        assert [path for path, _ in rig.engines["0"].calls if "pause" in path and path != "/is_paused"] == []


async def test_a_joiner_that_an_unfinished_update_left_paused_is_resumed(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path) as rig, ScriptedEngine(kind) as joiner:
        joiner.model.hold(Pause.RETRACT if kind == "sglang" else Pause.ABORT)
        rig.join("joiner", joiner)
        await rig.serving("joiner")
        assert joiner.model.pause is Pause.NONE


async def test_a_joiner_ahead_of_the_news_waits_for_it(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path) as rig, ScriptedEngine(kind, label="v1.1") as joiner:
        rig.join("joiner", joiner)
        await eventually(lambda: rig.fleet.snapshot().engines[0].version == "v1.1")
        assert rig.in_state(EngineState.SERVING) == []
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        await rig.serving("joiner")
        assert joiner.calls_of("/update_weights_from_disk") == []


async def test_nothing_is_served_before_a_version_is_published(tmp_path: Path) -> None:
    async with (
        ScriptedEngine() as engine,
        Supervisor() as supervisor,
        Fleet(FleetOptions(tmp_path), supervisor, Waits()) as fleet,
    ):
        fleet.add("0", engine.url)
        await eventually(lambda: fleet.snapshot().engines[0].version == "v1.0")
        assert fleet.snapshot().engines[0].state is EngineState.JOINING
        assert fleet.served_step is None


async def test_requests_may_end_by_themselves_before_a_pause_while_the_grace_lasts(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, pause_grace_s=20.0) as rig:
        model = rig.engines["0"].model
        running = rig.start()
        await soon(model.wait_for_requests(1))
        rig.publish(V1)
        moving = asyncio.create_task(rig.fleet.move_to(V1))
        await eventually(lambda: rig.in_state(EngineState.UPDATING) == ["0"])
        assert model.pause is Pause.NONE
        model.finish_all()
        response = await soon(running)
        assert (set(response.output_versions), response.num_pieces) == ({0}, 1)
        assert (await soon(moving)).num_moved == 1


async def test_a_grace_that_is_over_is_over(tmp_path: Path, kind: Kind) -> None:
    async with rig_of(tmp_path, kind, pause_grace_s=0.05) as rig:
        model = rig.engines["0"].model
        running = rig.start()
        await soon(model.wait_for_requests(1))
        model.advance(3)
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        await soon(model.wait_for_requests(1))
        model.finish_all()
        assert (await soon(running)).output_versions == [0] * 3 + [1] * 7


async def test_a_run_without_a_single_server_ends_with_the_reason(tmp_path: Path) -> None:
    options = FleetOptions(tmp_path, setup_timeout_s=0.05)
    async with Supervisor() as supervisor, Fleet(options, supervisor, Waits()) as fleet:
        await fleet.move_to(V0)
        with pytest.raises(
            TimedOut, match=r"rollout\.setup_timeout, 0\.05 s, after v1\.0 was published; registered: none"
        ):
            await soon(supervisor.wait())
