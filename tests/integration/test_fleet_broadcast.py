"""Weights by broadcast: real engines in processes of their own, a real gloo group, the trainer's sender behind gRPC.

Whatever happens to a member or to the group, each server ends with the published weights, or out of the fleet.
"""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch
from safetensors.torch import load_file

from headway.core.version import PolicyVersion
from headway.runtime.grpc_server import serve_grpc
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.v1.weights_pb2_grpc import add_WeightSourceServicer_to_server
from headway.workflow import GenerationHyperparameters, ModelRequest
from services.inference.tiny_model import make_model, save_tiny_model
from services.rollout_controller.fleet import Fleet, FleetOptions
from services.rollout_controller.fleet_member import EngineState
from services.rollout_controller.fleet_status import MoveReport
from services.rollout_controller.weight_source import TrainerSource
from services.trainer import broadcast
from services.trainer.broadcast import WeightSender, WeightSourceApi

pytestmark = pytest.mark.slow
SERVICE = "headway.v1.WeightSource"
SOON_S = 60.0
V0, V1, V2, V3 = (PolicyVersion(1, step) for step in range(4))


def sent_weights(version: PolicyVersion) -> dict[str, torch.Tensor]:
    """What the trainer holds of a version."""
    state = make_model(seed=100 + version.step).state_dict()
    state.pop("lm_head.weight", None)  # tied
    return {name: tensor.contiguous() for name, tensor in state.items()}


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """As engines report it."""
    return hashlib.sha256(tensors["model.embed_tokens.weight"].numpy().tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published versions v1.0 to v1.3, each with other weights."""
    root = tmp_path_factory.mktemp("weights")
    for version in (V0, V1, V2, V3):
        save_tiny_model(root / version.label, seed=version.step)
        files = [
            {"name": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
            for f in (root / version.label).iterdir()
        ]
        (root / version.label / "manifest.json").write_bytes(orjson.dumps({"files": files}))
    return root


@dataclass
class Engine:
    process: "subprocess.Popen[str]"
    url: str


@pytest.fixture(scope="module")
def engines(root: Path) -> Iterator[dict[str, Engine]]:
    """Engines that the tests of this file share; "mortal" may be killed by one of them."""
    script = str(Path(__file__).with_name("broadcast_engine.py"))
    words = [sys.executable, script, str(root / V0.label), str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {name: subprocess.Popen(words, **pipes) for name in ("0", "1", "mortal")}
    try:
        yield {name: Engine(process, _address_of(process)) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@dataclass
class Rig:
    """A fleet, engines to take into it, and the trainer's sender."""

    fleet: Fleet
    sender: WeightSender
    root: Path
    addresses: list[str]
    engines: dict[str, Engine]
    known: dict[str, str]
    """Names of weights, by checksum."""

    async def join(self, *names: str) -> None:
        """Take engines in, and wait until they serve."""
        for name in names:
            url = self.engines[name].url
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/update_weight_version", json={"new_version": "default"}) as reply,
            ):
                assert reply.status == 200
            self.fleet.add(name, url, "builtin")
        await eventually(lambda: set(self.in_state(EngineState.SERVING)) >= set(names))

    def in_state(self, state: EngineState) -> list[str]:
        return [status.name for status in self.fleet.snapshot().engines if status.state is state]

    def hold(self, version: PolicyVersion) -> None:
        """Let the trainer hold a version. Its weights are not those on disk: one can tell by which way they came."""
        self.sender.hold(version, sent_weights(version))

    async def publish(self, version: PolicyVersion) -> MoveReport:
        self.hold(version)
        report: MoveReport = await soon(self.fleet.move_to(version))
        return report

    async def weights(self, name: str) -> str:
        """Which weights a server has: "sent v1.1", "disk v1.1"."""
        _, reply = await self.fleet._members[name].server.http.call("POST", "/weights_checker", {})
        found = reply["ranks"][0]["checksums"]["model.embed_tokens.weight"]
        return self.known[found]


@pytest.fixture
async def rig(root: Path, engines: dict[str, Engine]) -> AsyncIterator[Rig]:
    addresses: list[str] = []

    async def registered() -> Sequence[str]:
        return addresses

    async with AsyncExitStack() as stack:
        sender = WeightSender("127.0.0.1", torch.device("cpu"))
        api = WeightSourceApi(sender)
        server = await stack.enter_async_context(
            serve_grpc("127.0.0.1", 0, lambda server: add_WeightSourceServicer_to_server(api, server), [SERVICE])
        )
        addresses.append(f"127.0.0.1:{server.port}")
        source = TrainerSource(registered)
        stack.push_async_callback(source.close)
        supervisor = await stack.enter_async_context(Supervisor())
        fleet = await stack.enter_async_context(Fleet(FleetOptions(root), supervisor, Waits(), source))
        await fleet.move_to(V0)
        yield Rig(fleet, sender, root, addresses, engines, known_weights(root))


def known_weights(root: Path) -> dict[str, str]:
    versions = (V0, V1, V2, V3)
    on_disk = {checksum_of(load_file(root / v.label / "model.safetensors")): f"disk {v.label}" for v in versions}
    return on_disk | {checksum_of(sent_weights(v)): f"sent {v.label}" for v in versions}


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, SOON_S)


async def eventually(is_true: Any) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_true():  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.01)


async def test_servers_receive_what_the_trainer_holds(rig: Rig) -> None:
    await rig.join("0", "1")
    report = await rig.publish(V1)
    assert (report.num_moved, report.num_out) == (2, 0)
    assert [await rig.weights(name) for name in ("0", "1")] == ["sent v1.1"] * 2
    await rig.publish(V2)
    assert [await rig.weights(name) for name in ("0", "1")] == ["sent v1.2"] * 2
    assert rig.sender._num_groups == 1, "the group is kept while its members are the same"


async def test_running_requests_go_on_with_both_versions(rig: Rig) -> None:
    await rig.join("0")
    gconfig = GenerationHyperparameters(max_new_tokens=600, ignore_eos=True)
    running = asyncio.create_task(rig.fleet.engine().agenerate(ModelRequest(input_ids=[5, 6, 7], gconfig=gconfig)))
    pieces = rig.fleet._members["0"].server._open
    await eventually(lambda: any(piece.ids for piece in pieces.values()))
    await rig.publish(V1)
    response = await soon(running)
    assert (sorted(set(response.output_versions)), response.output_len) == ([0, 1], 600)


async def test_weights_travel_in_buckets(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 400_000)
    assert len(list(broadcast.buckets(sent_weights(V1)))) > 3
    await rig.join("0")
    await rig.publish(V1)
    assert await rig.weights("0") == "sent v1.1"


async def test_a_joiner_starts_from_disk_and_is_in_the_group_the_next_time(rig: Rig) -> None:
    await rig.join("0")
    await rig.publish(V1)
    await rig.join("1")
    assert await rig.weights("1") == "disk v1.1"
    await rig.publish(V2)
    assert [await rig.weights(name) for name in ("0", "1")] == ["sent v1.2"] * 2
    assert rig.sender._num_groups == 2


async def test_a_server_that_dies_costs_the_others_nothing(rig: Rig) -> None:
    await rig.join("0", "mortal")
    await rig.publish(V1)
    rig.engines["mortal"].process.kill()
    rig.engines["mortal"].process.wait()
    report = await rig.publish(V2)
    assert (report.num_moved, report.num_out) == (1, 1)
    assert await rig.weights("0") == "sent v1.2"


async def test_without_a_trainer_that_holds_the_version_servers_load_from_disk(rig: Rig) -> None:
    await rig.join("0")
    rig.hold(V3)
    await soon(rig.fleet.move_to(V1))
    assert await rig.weights("0") == "disk v1.1"
    rig.addresses.clear()
    await soon(rig.fleet.move_to(V2))
    assert await rig.weights("0") == "disk v1.2"


async def test_a_transfer_that_fails_takes_servers_out_and_disk_brings_them_back(rig: Rig) -> None:
    await rig.join("0")
    tensors = dict(sent_weights(V1))
    tensors["model.norm.weight"] = torch.ones(3)
    rig.sender.hold(V1, tensors)
    report = await soon(rig.fleet.move_to(V1))
    assert (report.num_moved, report.num_out) == (0, 1)
    await eventually(lambda: rig.in_state(EngineState.SERVING) == ["0"])
    assert await rig.weights("0") == "disk v1.1"
    await rig.publish(V2)
    assert await rig.weights("0") == "sent v1.2"
