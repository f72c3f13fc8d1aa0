"""The trainer runs a trial by itself: it publishes each version before it commits the step, and ends."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from trainer_harness import BATCH, SAMPLES, Stage, stage
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.core.trajectory import Group
from headway.core.version import PolicyVersion
from headway.doctor.statistics import FRACTION, Statistic
from headway.errors import HeadwayError, InvalidInput
from headway.runtime.grpc_client import connect
from headway.testing.scripted_controller import ScriptedController, random_group
from headway.v1 import rollout_controller_pb2 as pb_controller
from headway.v1 import trainer_pb2 as pb
from headway.v1.trainer_pb2_grpc import TrainerStub
from services.trainer import app
from services.trainer.checkpoint import find_fault
from services.trainer.weights import read_manifest


async def train_to_the_end(trial: Stage) -> None:
    async with app.run(trial.config, trial.placement()) as running:
        await running.supervisor.wait()


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


VALID = {
    "valid_dataset": {"path": "python:examples.sort_digits.rows", "split": "test", "max_rows": 6},
    "evaluator": {"at_start": True, "at_end": True},
}


async def test_a_run_publishes_commits_evaluates_exports_and_ends(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=3, **VALID) as trial:
        published = []
        watch = asyncio.create_task(collect_versions(trial, published))
        await train_to_the_end(trial)
        seen, paths = trial.controller, trial.config.paths
        record = await trial.names.get_version()
        watch.cancel()
    assert [(commit.step, commit.version) for commit in seen.commits] == [
        (s, PolicyVersion(1, s + 1)) for s in range(3)
    ]
    assert seen.begins == [(seen.fencing_token, 0, True)]
    assert [step for step, _ in seen.fetches] == [0, 1, 2]
    assert seen.evaluations == [(PolicyVersion(1, 0), 6), (PolicyVersion(1, 3), 6)]
    assert len(seen.consumed) == len(set(seen.consumed)) == 3 * BATCH
    assert len(seen.tasks) == 3 * BATCH
    assert record is not None
    assert (record.version, record.manifest_sha256) == (PolicyVersion(1, 3), read_manifest(paths.weights / "v1.3")[1])
    assert published[0] == PolicyVersion(1, 0)
    lines = [orjson.loads(line) for line in (paths.logs / "stats.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert "eval/task_reward/avg" in lines[0]
    assert "eval/task_reward/avg" in lines[3]
    exported = weights_of(paths.checkpoints / "v1.3")
    initial = weights_of(paths.weights / "v1.0")
    assert any(not np.array_equal(exported[name], initial[name]) for name in initial)
    assert AutoTokenizer.from_pretrained(paths.checkpoints / "v1.3").encode("sort 12=")


async def collect_versions(trial: Stage, seen: list[PolicyVersion]) -> None:
    async for record in trial.names.watch_versions():
        seen.append(record.version)


async def test_a_commit_tells_what_people_want_to_know(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=1) as trial:
        await train_to_the_end(trial)
        stats = trial.controller.commits[0].stats
    assert stats["rollout/samples"] == BATCH * SAMPLES
    for name in (
        "ppo_actor/task_reward/avg",
        "ppo_actor/update/actor_loss/avg",
        "ppo_actor/update/grad_norm",
        "ppo_actor/update/entropy/avg",
        "ppo_actor/update/lr",
        "rollout/staleness/max",
        "rollout/tokens",
        "throughput/samples_per_s",
        "timing/wait_for_batch",
        "timing/logprob",
        "timing/update",
        "timing/write",
        "timing/publish",
        "timing/step",
    ):
        assert name in stats, name


async def test_the_doctor_reads_numbers_that_the_trainer_tells(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=1) as trial:
        await train_to_the_end(trial)
        stats = trial.controller.commits[0].stats
    assert {name for name in Statistic if name not in stats} == set()
    assert f"{FRACTION}0" in stats


async def test_a_version_is_published_before_its_step_is_committed(tmp_path: Path) -> None:
    order = []

    class Noting(ScriptedController):
        async def Commit(self, request: pb_controller.CommitRequest, context: Any) -> pb_controller.CommitReply:
            record = await trial.names.get_version()
            order.append((request.step, record.version))
            return await super().Commit(request, context)

    async with stage(tmp_path, steps=2, make=Noting) as trial:
        await train_to_the_end(trial)
    assert order == [(0, PolicyVersion(1, 1)), (1, PolicyVersion(1, 2))]


async def test_the_next_batch_is_fetched_while_this_one_trains(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=3) as trial:
        await train_to_the_end(trial)
    order = trial.controller.calls
    assert order.index(("fetch", 1)) < order.index(("commit", 0))
    assert order.index(("fetch", 2)) < order.index(("commit", 1))


async def test_a_step_that_is_not_finite_is_skipped_and_makes_no_version(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=3) as trial:
        fetch = trial.controller._compose
        num_composed = 0

        def compose(step: int, num_groups: int) -> list[Group]:
            nonlocal num_composed
            groups = fetch(step, num_groups)
            num_composed += 1
            return [without_evidence(group) for group in groups] if num_composed == 2 else groups

        trial.controller._compose = compose
        await train_to_the_end(trial)
        seen = trial.controller
    assert [(commit.step, commit.version.step) for commit in seen.commits] == [(0, 1), (1, 1), (1, 2), (2, 3)]
    assert len(seen.consumed) == len(set(seen.consumed)) == 4 * BATCH
    assert seen.commits[-1].stats["num_skipped_steps"] == 1
    until_skipped = seen.calls[: seen.calls.index(("commit", 1))]
    assert ("fetch", 2) not in until_skipped, "a batch is asked for only when the step before it has been updated"


def without_evidence(group: Group) -> Group:
    samples = [dataclasses.replace(s, logprobs=s.logprobs * np.float32("nan")) for s in group.trajectories]
    return Group(group.task_id, tuple(samples))


async def test_five_skipped_steps_in_a_row_end_the_run_with_the_reason(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=3) as trial:
        trial.controller.make_group = lambda task_id, step: without_evidence(random_group(task_id, step))
        with pytest.raises(HeadwayError, match="5 steps in a row, at step 0"):
            await train_to_the_end(trial)
        record = await trial.names.get_version()
        assert record is not None
        assert record.version == PolicyVersion(1, 0)


async def test_a_batch_that_breaks_the_bound_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=5) as trial:
        trial.controller.staleness = 2
        with pytest.raises(InvalidInput, match="is 2 versions old; max_head_offpolicyness is 1"):
            await train_to_the_end(trial)
        assert [commit.step for commit in trial.controller.commits] == [0, 1]


async def test_status_says_what_is_waited_for_and_stop_ends_the_run(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=9) as trial:
        await trial.controller.open(False)
        async with app.run(trial.config, trial.placement()) as running:
            channel = connect(f"127.0.0.1:{running.ports['grpc']}")
            stub = TrainerStub(channel)
            await trial.controller.until(lambda seen: len(seen.pending) == 3 * BATCH)
            status = await until_phase(stub, pb.TRAINER_PHASE_WAITING)
            assert (status.version.term, status.version.step, status.total_steps) == (1, 0, 9)
            assert [wait.what for wait in status.waits] == [f"{BATCH} ready groups for step 0"]
            await stub.Stop(pb.StopRequest(reason="enough"))
            await running.supervisor.wait()
            assert (await stub.GetStatus(pb.GetStatusRequest())).phase == pb.TRAINER_PHASE_FINISHED
            await channel.close()
        assert trial.controller.commits == []


async def test_save_writes_a_checkpoint_while_a_batch_is_waited_for_and_between_steps(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=9) as trial:
        await trial.controller.open(False)
        async with app.run(trial.config, trial.placement()) as running:
            channel = connect(f"127.0.0.1:{running.ports['grpc']}")
            stub = TrainerStub(channel)
            await until_phase(stub, pb.TRAINER_PHASE_WAITING)
            first = await stub.Save(pb.SaveRequest(), timeout=30)
            await trial.controller.open(True)
            await trial.controller.until(lambda seen: len(seen.commits) >= 1)
            second = await stub.Save(pb.SaveRequest(), timeout=30)
            await running.supervisor.wait()
            await channel.close()
    assert find_fault(Path(first.path)) is None
    assert (first.version.step, Path(first.path).name) == (0, "v1.0")
    assert second.version.step >= 1
    assert trial.controller.forgotten_before == second.version.step


async def until_phase(stub: TrainerStub, phase: int) -> pb.TrainerStatus:
    async with asyncio.timeout(60):
        while True:
            status = await stub.GetStatus(pb.GetStatusRequest())
            if status.phase == phase:
                return status
            await asyncio.sleep(0.01)


async def test_the_warm_start_learns_and_the_initial_version_carries_it(tmp_path: Path) -> None:
    warm = {"warm_start": {"steps": 20, "batch_size": 16, "lr": 1e-2}}
    async with stage(tmp_path / "warm", steps=1, **warm) as trial:
        await train_to_the_end(trial)
        learnt = weights_of(trial.config.paths.weights / "v1.0")
    async with stage(tmp_path / "again", steps=1, **warm) as trial:
        await train_to_the_end(trial)
        again = weights_of(trial.config.paths.weights / "v1.0")
    assert all(np.array_equal(learnt[name], again[name]) for name in learnt)


async def test_old_versions_go_when_no_server_needs_them(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=8) as trial:
        trial.controller.versions_in_use = [PolicyVersion(1, 1)]
        await train_to_the_end(trial)
        left = sorted(PolicyVersion.parse(path.name) for path in trial.config.paths.weights.glob("v*"))
    assert left == [PolicyVersion(1, 1), *(PolicyVersion(1, step) for step in (5, 6, 7, 8))]
    assert not list(trial.config.paths.weights.glob(".*"))


async def test_the_trace_shows_every_phase_of_every_step(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=2, perf_tracer={"enabled": True}) as trial:
        await train_to_the_end(trial)
        text = (trial.config.paths.traces / "trainer.json").read_text()
    events = orjson.loads(text.rstrip(",") + "]")
    spans = [event for event in events if event["ph"] == "X"]
    names = [span["name"] for span in spans]
    for phase in ("wait_for_batch", "logprob", "advantages", "update", "commit"):
        assert names.count(phase) == 2, phase
    assert names.count("publish") == 3
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step 0", "step 1"]
    assert all(span["dur"] >= 0 for span in spans)
    outer = [span for span in spans if span["name"] in ("wait_for_batch", "update", "commit")]
    assert [span["ts"] for span in outer] == sorted(span["ts"] for span in outer)
