"""The controller among real services: names, rewards, an engine over HTTP, a trainer over gRPC, people over HTTP."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headway.config import ExperimentConfig, load_experiment
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.grpc_client import connect
from headway.runtime.names import NameClient
from headway.runtime.service import Placement
from headway.runtime.wire import group_from_bytes, version_to_wire
from headway.testing.scripted_engine import ScriptedEngine
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerStub
from headway.workflow.api import InferenceEngine, RolloutWorkflow
from services.name_resolve import app as name_resolve
from services.reward import app as reward
from services.rollout_controller import app as rollout_controller

MODEL = Path(__file__).parents[2] / "configs/models/sort_digits"
EXPERIMENT = f"""
experiment_name: test
trial_name: controller
tokenizer_path: {MODEL}
allocation_mode: sglang:d1+d1
cluster: {{fileroot: FILEROOT, name_resolve: {{type: memory}}}}
rollout: {{max_concurrent_rollouts: 16, consumer_batch_size: 4, max_head_offpolicyness: 1}}
gconfig: {{n_samples: 2, max_new_tokens: 4}}
actor: {{path: {MODEL}}}
reward: {{function: exact, num_workers: 1}}
train_dataset: {{path: "python:examples.sort_digits.rows", batch_size: 4, type: rl}}
"""


@dataclass
class World:
    """Every other service, and a controller among them."""

    config: ExperimentConfig
    names: NameClient
    engine: ScriptedEngine
    stub: Any
    http: str

    async def publish(self, version: PolicyVersion) -> None:
        folder = self.config.paths.weights / version.label
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"vocab_size": 58}))
        (folder / "manifest.json").write_text("{}")
        await self.names.publish_version(version, "0" * 64, 1)

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.http}{path}") as reply:
            assert reply.status == 200
            return await reply.json() if reply.content_type == "application/json" else await reply.text()


@asynccontextmanager
async def world(folder: Path, *overrides: str, tokens_per_s: float | None = float("inf")) -> AsyncIterator[World]:
    file = folder / "experiment.yaml"
    file.write_text(EXPERIMENT.replace("FILEROOT", str(folder)))
    config = load_experiment(file, overrides)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        resolver = await enter(name_resolve.run(config, Placement(run_dir=folder)))
        placement = Placement(f"127.0.0.1:{resolver.ports['grpc']}", run_dir=folder)
        rewards = await enter(reward.run(config, placement))
        names = await enter(NameClient(placement.name_resolve, config.run_name))
        await names.register("services/reward/0", f"127.0.0.1:{rewards.ports['grpc']}")
        engine = await enter(ScriptedEngine(label="v1.0", tokens_per_s=tokens_per_s))
        await names.register("services/inference/0", engine.url, metadata={"engine": "builtin"})
        running = await enter(rollout_controller.run(config, placement))
        address = (await names.get("services/rollout-controller/0")).value
        channel = await enter(connect(address))
        yield World(config, names, engine, RolloutControllerStub(channel), f"127.0.0.1:{running.ports['http']}")


async def submit(stub: Any, count: int) -> pb.SubmitReply:
    rows = [{"prompt": f"sort {10000000 + row}=", "answer": "00000001"} for row in range(count)]
    made = [types_pb2.Task(task_id=f"0/{row}", data_json=json.dumps(data).encode()) for row, data in enumerate(rows)]

    async def requests() -> AsyncIterator[pb.SubmitRequest]:
        yield pb.SubmitRequest(tasks=made)

    return await stub.Submit(requests(), timeout=10)


async def evaluate(stub: Any, count: int, num_samples: int) -> int:
    """Roll out an evaluation of v1.0; the number of its samples."""
    header = pb.EvaluateHeader(version=version_to_wire(PolicyVersion(1, 0)), num_samples=num_samples)

    async def requests() -> AsyncIterator[pb.EvaluateRequest]:
        yield pb.EvaluateRequest(header=header)
        for row in range(count):
            data = json.dumps({"prompt": f"sort {row}=", "answer": "1"}).encode()
            yield pb.EvaluateRequest(task=types_pb2.Task(task_id=f"e/{row}", data_json=data))

    return sum([len(reply.group.trajectories) async for reply in stub.Evaluate(requests(), timeout=30)])


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_step_from_submission_to_commit_with_every_service_real(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.publish(PolicyVersion(1, 0))
        await here.stub.Begin(pb.BeginRequest(fencing_token=1, step=0, is_fresh=True))
        await submit(here.stub, 12)
        parts = [
            part
            async for part in here.stub.FetchBatch(
                pb.FetchBatchRequest(step=0, num_groups=4, fencing_token=1), timeout=30
            )
        ]
        groups = [group_from_bytes(group) for part in parts for group in part.groups]
        assert [group.task_id for group in groups] == ["0/0", "0/1", "0/2", "0/3"]
        for group in groups:
            for trajectory in group.trajectories:
                assert set(trajectory.versions[trajectory.loss_mask].tolist()) == {0}
        await here.publish(PolicyVersion(1, 1))
        version = version_to_wire(PolicyVersion(1, 1))
        reply = await here.stub.Commit(
            pb.CommitRequest(step=0, fencing_token=1, version=version, stats={"reward": 0.25})
        )
        assert PolicyVersion(1, 1) in {PolicyVersion(used.term, used.step) for used in reply.versions_in_use}
        report = await here.get("/v1/report")
        assert report["history"][0]["stats"] == {"reward": 0.25}
        assert report["history"][0]["tokens_by_staleness"] == {"0": 4 * 2 * 4}


async def test_the_status_answers_what_a_person_asks(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        before = await here.get("/v1/status")
        assert before["staleness"]["holds_back"] == "no server serves a published version yet"
        assert any("published version" in wait["what"] for wait in before["waits"])
        await here.publish(PolicyVersion(1, 0))
        await submit(here.stub, 12)
        await until(here, lambda status: status["tasks"]["ready"] == 8)
        status = await here.get("/v1/status")
        assert status["published_version"] == "v1.0"
        assert status["tasks"]["submitted"] == 12
        assert status["tasks"]["is_conserved"]
        assert status["staleness"] | {"holds_back": ""} == {
            "policy": "mask",
            "eta": 1,
            "batch_size": 4,
            "served_step": 0,
            "outstanding": 8,
            "limit": 8,
            "max_concurrent": 16,
            "capacity": 0,
            "holds_back": "",
        }
        assert "staleness: 8 groups" in status["staleness"]["holds_back"]
        assert [server["served_version"] for server in status["servers"]] == ["v1.0"]
        assert {service["name"] for service in status["services"]} == {
            "inference/0",
            "reward/0",
            "rollout-controller/0",
        }
        assert status["timing"]["num_groups"] == 8
        assert 'headway_tasks{state="ready"} 8.0' in await here.get("/metrics")
        assert "/v1/status" in (await here.get("/openapi.json"))["paths"]


async def test_every_sample_and_episode_is_on_disk_when_the_controller_has_ended(tmp_path: Path) -> None:
    asked = ("rollout.dump_to_file=true", "perf_tracer.session_tracer.enabled=true", "evaluator.num_samples=3")
    async with world(tmp_path, *asked, "rollout.check_trajectory_format=true") as here:
        await here.publish(PolicyVersion(1, 0))
        await submit(here.stub, 4)
        await until(here, lambda status: status["tasks"]["ready"] == 4)
        assert await evaluate(here.stub, 2, num_samples=3) == 2 * 3
    paths = here.config.paths
    samples = lines_of(paths.rollouts / "0" / "samples.jsonl")
    assert sorted((line["task_id"], line["sample"]) for line in samples) == [
        (f"0/{row}", sample) for row in range(4) for sample in range(2)
    ]
    for line in samples:
        assert line["prompt"] == f"sort {10000000 + int(line['task_id'][2:])}="
        assert line["seqlen"] == len(line["token_ids"]) == line["prompt_len"] + 4
        assert (line["version_min"], line["version_max"], line["num_loss_tokens"]) == (0, 0, 4)
    assert len(lines_of(paths.eval_rollouts / "0" / "samples.jsonl")) == 2 * 3
    sessions = lines_of(paths.traces / "sessions.jsonl")
    assert Counter(session["kind"] for session in sessions) == {"train": 8, "evaluation": 6}
    for session in sessions:
        assert [phase["name"] for phase in session["phases"]] == ["generate", "reward"]
        assert session["status"] == "finished"


async def test_a_workflow_that_returns_a_fault_is_named_by_its_first_one(tmp_path: Path) -> None:
    asked = ("workflow.path=test_controller_app.FloatIds", "rollout.check_trajectory_format=true")
    async with world(tmp_path, *asked) as here:
        await here.publish(PolicyVersion(1, 0))
        await submit(here.stub, 1)
        await until(here, lambda status: status["tasks"]["quarantined"] == 1)
        quarantined = (await here.get("/v1/report"))["quarantined"]
        assert "input_ids holds float64; expected whole numbers" in str(quarantined)


class FloatIds(RolloutWorkflow):
    """Returns token ids as floats."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": [1.0, 2.0],
            "logprobs": [0.0, -1.0],
            "loss_mask": [0, 1],
            "versions": [-1, 0],
            "rewards": 1,
        }


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("workflow.path=headway.workflow.RLVRWorkflows", "RLVRWorkflow"),
        ("workflow.should_accept_fn=examples.nothing.here", "examples.nothing"),
    ],
)
async def test_a_mistake_in_the_file_ends_the_start_with_its_name(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        async with world(tmp_path, override):
            pass


async def until(here: World, condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition(await here.get("/v1/status")):  # noqa: ASYNC110 - seen from outside, over HTTP
            await asyncio.sleep(0.01)
