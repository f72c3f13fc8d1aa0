"""`kill -9` of the controller: batches come again as they were, ready groups are back, the leader is remembered.

| what is killed                                       | seen so far                                       |
|------------------------------------------------------|---------------------------------------------------|
| the controller, with groups leased, ready, running   | same batches, no group lost, no task done twice   |
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headway.config import load_experiment
from headway.core.version import PolicyVersion
from headway.runtime.grpc_client import connect
from headway.runtime.names import NameClient
from headway.runtime.service import READY_PREFIX, Placement
from headway.runtime.wire import version_to_wire
from headway.testing.scripted_engine import ScriptedEngine
from headway.v1 import rollout_controller_pb2 as pb
from headway.v1 import types_pb2
from headway.v1.rollout_controller_pb2_grpc import RolloutControllerStub
from services.name_resolve import app as name_resolve
from services.reward import app as reward

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs/models/sort_digits"
EXPERIMENT = f"""
experiment_name: test
trial_name: kill
tokenizer_path: {MODEL}
allocation_mode: sglang:d1+d1
cluster: {{fileroot: FILEROOT, name_resolve: {{type: memory}}}}
rollout: {{max_concurrent_rollouts: 16, consumer_batch_size: 4, max_head_offpolicyness: 2}}
gconfig: {{n_samples: 2, max_new_tokens: 4}}
actor: {{path: {MODEL}}}
reward: {{function: exact, num_workers: 1}}
train_dataset: {{path: "python:examples.sort_digits.rows", batch_size: 4, type: rl}}
recover: {{mode: auto, freq_steps: 2}}
"""


async def test_after_a_kill_batches_come_again_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT.replace("FILEROOT", str(tmp_path)))
    async with surroundings(file) as placement:
        async with controller(file, placement) as (stub, process):
            await stub.Begin(pb.BeginRequest(fencing_token=7, step=0, is_fresh=True))
            assert await submit(stub, 40) == 40
            before = [await fetch(stub, step) for step in (0, 1)]
            version = version_to_wire(PolicyVersion(1, 1))
            await stub.Commit(pb.CommitRequest(step=0, fencing_token=7, version=version))
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with controller(file, placement) as (stub, _):
            assert [await fetch(stub, step) for step in (0, 1)] == before
            leased = {group.task_id for batch in before for group in batch}
            num_ready = 40 - len(leased) - await submit(stub, 40)
            assert 0 <= num_ready <= 4
            third = await fetch(stub, 2)
            assert not leased & {group.task_id for group in third}
            with pytest.raises(grpc.aio.AioRpcError, match="fencing token 6 is old"):
                await stub.Begin(pb.BeginRequest(fencing_token=6, step=0))


@asynccontextmanager
async def surroundings(file: Path) -> AsyncIterator[Placement]:
    """Names, rewards, an engine, and a published version."""
    config = load_experiment(file)
    placement = Placement(run_dir=file.parent)
    async with name_resolve.run(config, placement) as resolver, reward.run(config, placement) as rewards:
        address = f"127.0.0.1:{resolver.ports['grpc']}"
        async with (
            NameClient(address, config.run_name) as names,
            ScriptedEngine(label="v1.0", tokens_per_s=float("inf")) as engine,
        ):
            await names.register("services/reward/0", f"127.0.0.1:{rewards.ports['grpc']}")
            await names.register("services/inference/0", engine.url, metadata={"engine": "builtin"})
            folder = config.paths.weights / "v1.0"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"vocab_size": 58}))
            (folder / "manifest.json").write_text("{}")
            await names.publish_version(PolicyVersion(1, 0), "0" * 64, 1)
            yield Placement(address, run_dir=file.parent)


@asynccontextmanager
async def controller(file: Path, placement: Placement) -> AsyncIterator[tuple[Any, asyncio.subprocess.Process]]:
    """A controller in a process of its own; yields its stub when it is ready."""
    options = {"config": file, "name-resolve": placement.name_resolve, "run-dir": placement.run_dir}
    flags = [f"--{name}={value}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.rollout_controller", *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith(READY_PREFIX)
        port = json.loads(line.removeprefix(READY_PREFIX))["ports"]["grpc"]
        async with connect(f"127.0.0.1:{port}") as channel:
            yield RolloutControllerStub(channel), process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def submit(stub: Any, count: int) -> int:
    rows = [{"prompt": f"sort {10000000 + row}=", "answer": "00000001"} for row in range(count)]
    tasks = [types_pb2.Task(task_id=f"0/{row}", data_json=json.dumps(data).encode()) for row, data in enumerate(rows)]

    async def requests() -> AsyncIterator[pb.SubmitRequest]:
        yield pb.SubmitRequest(tasks=tasks)

    return int((await stub.Submit(requests(), timeout=20)).num_new)


async def fetch(stub: Any, step: int) -> list[types_pb2.Group]:
    request = pb.FetchBatchRequest(step=step, num_groups=4, fencing_token=7)
    replies = [reply async for reply in stub.FetchBatch(request, timeout=60)]
    return [types_pb2.Group.FromString(group) for reply in replies for group in reply.groups]
