"""The fleet against engines with a model: the built-in one, and real SGLang where the environment gives one.

An update in the middle of generation leaves each token with the version that made it, and with its log-prob by it.
"""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from fleet_harness import SOON_S, V0, V1, V2, Rig, eventually, request, soon
from transformers import AutoModelForCausalLM

from headway.core.version import PolicyVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.workflow import ModelResponse
from services.rollout_controller.fleet import Fleet, FleetOptions

PROMPT = [5, 6, 7, 8]
TOLERANCE = {"builtin": 1e-4, "sglang": 2e-3}
WEIGHTS = {V0: "a", V1: "b"}


def published(models: Path, version: PolicyVersion) -> None:
    """A version's folder, as the trainer would write it, from one of the models."""
    folder = models / version.label
    if folder.exists():
        return
    shutil.copytree(models / WEIGHTS[version], folder)
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in folder.iterdir()
    ]
    manifest = {"version": {"term": version.term, "step": version.step}, "parent": None, "files": files}
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest))


@pytest.fixture
async def rig(server: tuple[str, str], models: Path) -> AsyncIterator[Rig]:
    """A fleet of one engine that serves v1.0; v1.1 is published, but not announced."""
    kind, url = server
    for version in WEIGHTS:
        published(models, version)
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/update_weight_version", json={"new_version": "default"}) as reply:
            assert reply.status == 200
    waits = Waits()
    async with Supervisor() as supervisor, Fleet(FleetOptions(models), supervisor, waits) as fleet:
        await fleet.move_to(V0)
        fleet.add("0", url, kind)
        rig = Rig(fleet, waits, supervisor, models)
        await rig.serving("0")
        yield rig


def logprobs_of(models: Path, version: PolicyVersion, ids: list[int]) -> np.ndarray:
    """[L - 1] log-probability of each token but the first, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(models / version.label, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    chosen: np.ndarray = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].numpy()
    return chosen


def check(models: Path, response: ModelResponse, tolerance: float) -> None:
    """Every log-prob is that of the version named for its token."""
    whole = response.input_tokens + response.output_tokens
    start = response.input_len - 1
    by_version = {version.step: logprobs_of(models, version, whole)[start:] for version in WEIGHTS}
    expected = [by_version[step][index] for index, step in enumerate(response.output_versions)]
    np.testing.assert_allclose(response.output_logprobs, expected, atol=tolerance)


async def test_a_request_brings_the_models_own_logprobs(rig: Rig, server: tuple[str, str], models: Path) -> None:
    engine = rig.fleet.engine()
    responses = await soon(asyncio.gather(*(engine.agenerate(request(PROMPT, ignore_eos=True)) for _ in range(4))))
    for response in responses:
        assert (response.output_len, set(response.output_versions)) == (10, {0})
        check(models, response, TOLERANCE[server[0]])


async def test_an_update_in_the_middle_leaves_each_token_with_its_version(
    rig: Rig, server: tuple[str, str], models: Path
) -> None:
    engine = rig.fleet.engine()
    wanted = request(PROMPT, max_new_tokens=600, ignore_eos=True)
    running = asyncio.create_task(engine.agenerate(wanted))
    pieces = rig.fleet._members["0"].server._open
    await eventually(lambda: any(piece.ids for piece in pieces.values()))
    report = await soon(rig.fleet.move_to(V1))
    assert (report.num_moved, report.num_out) == (1, 0)
    response = await soon(running)
    assert response.output_len == 600
    assert sorted(set(response.output_versions)) == [0, 1]
    check(models, response, TOLERANCE[server[0]])


async def test_damaged_weights_are_refused_before_the_engine_is_paused(
    rig: Rig, server: tuple[str, str], models: Path
) -> None:
    if server[0] != "builtin":
        pytest.skip("only the built-in engine reads ahead")
    damaged = models / V2.label
    shutil.copytree(models / V1.label, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    http = rig.fleet._members["0"].server.http
    report = await soon(rig.fleet.move_to(V2))
    assert (report.num_moved, report.num_out) == (0, 1)
    assert "sha256 differs" in rig.fleet.snapshot().engines[0].last_error
    assert (await http.call("GET", "/ready"))[0] == 200
    assert (await http.call("GET", "/model_info"))[1]["weight_version"] == "v1.0"


async def test_a_withdrawn_request_ends_at_the_engine(rig: Rig) -> None:
    engine = rig.fleet.engine()
    running = asyncio.create_task(engine.agenerate(request(PROMPT, max_new_tokens=3000, ignore_eos=True)))
    pieces = rig.fleet._members["0"].server._open
    await eventually(lambda: any(piece.ids for piece in pieces.values()))
    running.cancel()
    http = rig.fleet._members["0"].server.http
    async with asyncio.timeout(SOON_S):
        while (await http.call("POST", "/flush_cache"))[0] != 200:  # noqa: ASYNC110 - refused while a request runs
            await asyncio.sleep(0.05)
