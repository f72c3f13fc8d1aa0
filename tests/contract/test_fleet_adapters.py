"""The fleet where versions are adapters: the base stays, each request is made by the adapter that its version names."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from adapter_files import logprobs_with, write_adapter, write_manifest
from fleet_harness import V0, V1, V2, Rig, eventually, request, soon

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.published import base_name
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.workflow import ModelResponse
from headway.workflow.errors import EvidenceInvalid
from services.rollout_controller.fleet import Fleet, FleetOptions

PROMPT = [5, 6, 7, 8]
TOLERANCE = {"builtin": 1e-4, "sglang": 2e-3}
NAME = "policy"


@pytest.fixture(scope="module")
def root(models: Path) -> Iterator[Path]:
    """Two adapters of model `a`, published, and their base."""
    root = models / "published"
    root.mkdir()
    shutil.copytree(models / "a", root / "base")
    base = base_name(write_manifest(root / "base"))
    (root / "base").rename(root / base)
    for version in (V0, V1, V2):
        folder = write_adapter(root / version.label, root / base, seed=version.step)
        write_manifest(folder, base=base)
    yield root
    shutil.rmtree(root)


def base_of(root: Path) -> Path:
    return next(root.glob("base-*"))


@asynccontextmanager
async def fleet_of(root: Path, server: tuple[str, str]) -> AsyncIterator[Rig]:
    """A fleet at v1.0, and an engine of which it knows nothing yet."""
    kind, url = server
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as reply:
            loaded = [card["id"] for card in (await reply.json())["data"][1:]]
        for name in loaded:
            async with session.post("/unload_lora_adapter", json={"lora_name": name}) as reply:
                assert reply.status == 200
    waits = Waits()
    async with Supervisor() as supervisor, Fleet(FleetOptions(root, lora_name=NAME), supervisor, waits) as fleet:
        await fleet.move_to(V0)
        fleet.add("0", url, kind)
        rig = Rig(fleet, waits, supervisor, root)
        await rig.serving("0")
        yield rig


@pytest.fixture
async def rig(lora_server: tuple[str, str], root: Path) -> AsyncIterator[Rig]:
    async with fleet_of(root, lora_server) as rig:
        yield rig


async def adapters(rig: Rig) -> list[str]:
    http = rig.fleet._members["0"].server.http
    return [card["id"] for card in (await http.call("GET", "/v1/models"))[1]["data"][1:]]


def check(root: Path, response: ModelResponse, tolerance: float) -> None:
    """Every log-prob is that of the version named for its token."""
    whole = response.input_tokens + response.output_tokens
    by_step = {
        step: logprobs_with(base_of(root), root / f"v1.{step}", whole)[response.input_len - 1 :]
        for step in set(response.output_versions)
    }
    expected = [by_step[step][index] for index, step in enumerate(response.output_versions)]
    np.testing.assert_allclose(response.output_logprobs, expected, atol=tolerance)


async def test_an_engine_that_joins_gets_base_and_adapter(rig: Rig, lora_server: tuple[str, str], root: Path) -> None:
    """It came with other weights under another name."""
    http = rig.fleet._members["0"].server.http
    assert (await http.call("GET", "/model_info"))[1]["weight_version"] == base_of(root).name
    assert await adapters(rig) == ["policy-v1.0"]
    response = await soon(rig.fleet.engine().agenerate(request(PROMPT, ignore_eos=True)))
    assert (response.output_len, set(response.output_versions)) == (10, {0})
    check(root, response, TOLERANCE[lora_server[0]])


async def test_an_update_in_the_middle_leaves_each_token_with_its_version(
    rig: Rig, lora_server: tuple[str, str], root: Path
) -> None:
    wanted = request(PROMPT, max_new_tokens=600, ignore_eos=True)
    running = asyncio.create_task(rig.fleet.engine().agenerate(wanted))
    pieces = rig.fleet._members["0"].server._open
    await eventually(lambda: any(piece.ids for piece in pieces.values()))
    report = await soon(rig.fleet.move_to(V1))
    assert (report.num_moved, report.num_out) == (1, 0)
    response = await soon(running)
    assert (response.output_len, sorted(set(response.output_versions))) == (600, [0, 1])
    assert response.num_pieces > 1
    check(root, response, TOLERANCE[lora_server[0]])


async def test_only_the_newest_adapters_stay_loaded_and_the_base_is_not_loaded_again(rig: Rig, root: Path) -> None:
    http = rig.fleet._members["0"].server.http
    before = (await http.call("GET", "/model_info"))[1]["model_path"]
    for version in (V1, V2):
        await soon(rig.fleet.move_to(version))
    assert await adapters(rig) == ["policy-v1.1", "policy-v1.2"]
    assert (await http.call("GET", "/model_info"))[1]["model_path"] == before


async def test_a_controller_that_starts_again_finds_what_is_served(lora_server: tuple[str, str], root: Path) -> None:
    kind, url = lora_server
    async with fleet_of(root, lora_server):
        pass
    async with Supervisor() as supervisor, Fleet(FleetOptions(root, lora_name=NAME), supervisor, Waits()) as fleet:
        await fleet.move_to(V0)
        fleet.add("0", url, kind)
        await Rig(fleet, Waits(), supervisor, root).serving("0")
        assert fleet._members["0"].last_update is None


async def test_a_reply_by_another_base_is_refused(rig: Rig) -> None:
    http = rig.fleet._members["0"].server.http
    await http.call("POST", "/update_weight_version", {"new_version": "base-other", "abort_all_requests": False})
    with pytest.raises(EvidenceInvalid, match="base-other"):
        await soon(rig.fleet.engine().agenerate(request(PROMPT)))


@pytest.mark.parametrize("fault", ["whole", "other base", "damaged"])
async def test_what_is_no_adapter_of_a_known_base_is_not_served(
    rig: Rig, lora_server: tuple[str, str], root: Path, fault: str
) -> None:
    if fault == "damaged" and lora_server[0] != "builtin":
        pytest.skip("SGLang does not read manifests")
    version = PolicyVersion(1, 5)
    folder = shutil.copytree(root / "v1.1", root / version.label)
    base = {"whole": None, "other base": "base-0123", "damaged": base_of(root).name}[fault]
    write_manifest(folder, **({"base": base} if base else {}))
    if fault == "damaged":
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    try:
        report = await soon(rig.fleet.move_to(version))
        error = rig.fleet.snapshot().engines[0].last_error
    finally:
        shutil.rmtree(folder)
    assert (report.num_moved, report.num_out) == (0, 1)
    assert {"whole": "is no adapter", "other base": "is not there", "damaged": "sha256 differs"}[fault] in error


async def test_an_engine_without_adapters_is_refused(root: Path) -> None:
    options = FleetOptions(root, lora_name=NAME)
    async with Supervisor() as supervisor, Fleet(options, supervisor, Waits()) as fleet:
        with pytest.raises(InvalidInput, match="not by vLLM"):
            fleet.add("0", "http://127.0.0.1:1", "vllm")
