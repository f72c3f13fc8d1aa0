"""Weight updates: what is served afterwards, which tokens were made by which weights, and what is refused."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import PROMPT, Engine
from safetensors.torch import load_file, save_file

GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
UPDATED = "Succeeded to update model weights."
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


async def checksum(engine: Engine) -> str:
    status, answer = await engine.post("/weights_checker", action="checksum")
    assert (status, answer["success"]) == (200, True)
    assert all(len(value) == 16 for value in answer["ranks"][0]["checksums"].values())
    return str(answer["ranks"][0]["checksums"])


async def test_new_weights_change_the_output_and_the_version(engine: Engine) -> None:
    before, sums = await engine.generate(GREEDY), await checksum(engine)
    status, answer = await engine.load("b", weight_version="v1.1")
    assert (status, answer["success"]) == (200, True)
    assert answer["message"] == f"{UPDATED} Weight version updated to v1.1."
    after = await engine.generate(GREEDY)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "v1.1"
    assert after["meta_info"]["weight_versions"] == [{"version": "v1.1", "start": 0, "end": 16}]
    assert await checksum(engine) != sums
    await engine.load("a", weight_version="v1.2")
    assert await checksum(engine) == sums
    assert (await engine.generate(GREEDY))["output_ids"] == before["output_ids"]


async def test_an_update_renames_the_model(engine: Engine) -> None:
    await engine.load("b", weight_version="v1.1")
    _, info = await engine.get("/model_info")
    path = str(engine.models / "b")
    assert (info["model_path"], info["served_model_name"], info["weight_version"]) == (path, path, "v1.1")
    _, listed = await engine.get("/v1/models")
    assert listed["data"][0]["id"] == path


async def test_without_a_label_the_old_one_stays(engine: Engine) -> None:
    status, answer = await engine.load("b")
    assert (status, answer["message"]) == (200, UPDATED)
    assert await engine.version() == "default"


async def test_a_missing_folder_leaves_the_old_weights(engine: Engine) -> None:
    sums = await checksum(engine)
    status, answer = await engine.load("nothing", weight_version="v9.9")
    assert (status, answer["success"]) == (400, False)
    assert (await checksum(engine), await engine.version()) == (sums, "default")
    assert len((await engine.generate(GREEDY))["output_ids"]) == 16


async def test_a_path_outside_of_the_weights_is_refused(engine: Engine, tmp_path_factory: Any) -> None:
    if engine.kind == "sglang":
        pytest.skip("SGLang loads from anywhere")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(engine.models / "b", elsewhere / "b")
    (engine.models / "link").symlink_to(elsewhere / "b")
    for path in (str(elsewhere / "b"), str(engine.models / "link"), f"{engine.models}/../{elsewhere.name}/b"):
        status, answer = await engine.post("/update_weights_from_disk", model_path=path)
        assert (status, answer["success"]) == (400, False)
        assert "is not below the folder of published weights" in answer["message"]
    (engine.models / "link").unlink()


@pytest.mark.parametrize("fault", ["shape", "name", "truncated", "manifest", "pickle"])
async def test_weights_that_do_not_fit_are_refused_whole(engine: Engine, fault: str) -> None:
    if engine.kind == "sglang":
        pytest.skip("SGLang checks less")
    folder = engine.models / f"bad-{fault}"
    shutil.copytree(engine.models / "b", folder)
    file = folder / "model.safetensors"
    spoil(fault, folder, load_file(file))
    sums = await checksum(engine)
    status, answer = await engine.load(folder.name, weight_version="v9.9")
    assert (status, answer["success"]) == (400, False), answer
    assert (await checksum(engine), await engine.version()) == (sums, "default")


def spoil(fault: str, folder: Any, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    if fault == "shape":
        save_file(tensors | {"model.norm.weight": torch.ones(3)}, file)
    elif fault == "name":
        tensors["model.other.weight"] = tensors.pop("model.norm.weight")
        save_file(tensors, file)
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "manifest":
        (folder / "manifest.json").write_text('{"files": [{"name": "model.safetensors", "bytes": 1, "sha256": "0"}]}')
    else:
        file.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")


async def test_tokens_keep_the_version_that_made_them(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 200, "ignore_eos": True})
    await running.tokens(5)
    await engine.post("/pause_generation", mode="retract")
    status, answer = await engine.load("b", weight_version="v1.1")
    assert (status, answer["success"]) == (200, True)
    await engine.post("/continue_generation")
    meta = (await running.end())["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"]) == ("default", 0)
    assert 5 <= first["end"] == second["start"]
    assert (second["version"], second["end"]) == ("v1.1", 200)
    assert meta["weight_version"] == "v1.1"


async def test_retracted_requests_go_on_as_the_new_weights_would(engine: Engine) -> None:
    running = await engine.start({"temperature": 0, "max_new_tokens": 60, "ignore_eos": True})
    await engine.post("/pause_generation", mode="retract")
    await engine.load("b", weight_version="v1.1")
    await engine.post("/continue_generation")
    result = await running.end()
    old = result["meta_info"]["weight_versions"][0]["end"]
    sampling = {"temperature": 0, "max_new_tokens": 60 - old, "ignore_eos": True}
    fresh = await engine.generate(sampling, input_ids=PROMPT + result["output_ids"][:old])
    assert result["output_ids"][old:] == fresh["output_ids"]


async def test_in_place_without_a_flush_goes_on_with_the_old_cache(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 200, "ignore_eos": True})
    await engine.post("/pause_generation", mode="in_place")
    status, answer = await engine.load("b", weight_version="v1.1", flush_cache=False)
    assert (status, answer["success"]) == (200, True)
    assert await engine.version() == "v1.1"
    await engine.post("/continue_generation")
    versions = (await running.end())["meta_info"]["weight_versions"]
    assert [span["version"] for span in versions] == ["default", "v1.1"]


async def test_in_place_with_a_flush_updates_the_weights_and_says_failure(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 200, "ignore_eos": True})
    await engine.post("/pause_generation", mode="in_place")
    status, answer = await engine.load("b", weight_version="v1.1")
    assert (status, answer["success"], answer["message"]) == (400, False, NOT_FLUSHED)
    assert await engine.version() == "default"
    await engine.post("/continue_generation")
    versions = (await running.end())["meta_info"]["weight_versions"]
    assert [span["version"] for span in versions] == ["default", "v1.1"]


async def test_without_a_pause_an_update_waits_for_what_runs_and_holds_what_comes(engine: Engine) -> None:
    running = await engine.start({"max_new_tokens": 250, "ignore_eos": True})
    update = asyncio.create_task(engine.load("b", weight_version="v1.1"))
    await running.tokens(running.count + 5)
    late = asyncio.create_task(engine.generate({"max_new_tokens": 3, "ignore_eos": True}))
    assert (await update)[0] == 200
    assert [span["version"] for span in (await running.end())["meta_info"]["weight_versions"]] == ["default"]
    assert (await late)["meta_info"]["weight_version"] == "v1.1"


async def test_an_update_may_abort_what_runs(engine: Engine) -> None:
    running = await engine.start()
    status, _ = await engine.load("b", weight_version="v1.1", abort_all_requests=True)
    assert status == 200
    assert (await running.end())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_version_can_be_renamed(engine: Engine) -> None:
    status, answer = await engine.post("/update_weight_version", new_version="v7.7")
    assert (status, answer) == (
        200,
        {"success": True, "message": "Weight version updated to v7.7", "new_version": "v7.7"},
    )
    assert await engine.version() == "v7.7"
    assert (await engine.generate(GREEDY))["meta_info"]["weight_version"] == "v7.7"


async def test_an_unknown_check_is_refused(engine: Engine) -> None:
    status, answer = await engine.post("/weights_checker", action="divine")
    assert (status, answer["success"]) == (400, False)


async def test_update_sessions_open_and_close_in_turn(engine: Engine) -> None:
    session = "begin_weight_update() and end_weight_update()"
    tensors = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    status, answer = await engine.post("/update_weights_from_distributed", **tensors)
    assert (status, session in answer["message"]) == (400, True)
    assert (await engine.post("/end_weight_update"))[0] == 400
    assert (await engine.post("/begin_weight_update"))[0] == 200
    assert (await engine.post("/begin_weight_update"))[0] == 400
    assert (await engine.post("/update_weights_from_distributed", **tensors))[0] == 400  # no such group
    assert (await engine.post("/end_weight_update"))[0] == 200
    status, answer = await engine.post("/destroy_weights_update_group", group_name="none")
    assert (status, answer["message"]) == (400, "The group to be destroyed does not exist.")


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_weights_arrive_over_a_process_group(engine: Engine, load_format: str | None) -> None:
    name, file = f"weights-{load_format}", engine.models / "b" / "model.safetensors"
    async with trainer(file, name, load_format or "") as (port, joined, broadcast):
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        status, answer = await engine.post("/init_weights_update_group", **where, group_name=name, backend="gloo")
        assert (status, answer["success"]) == (200, True), answer
        await joined()
        running = await engine.start({"max_new_tokens": 150, "ignore_eos": True})
        await engine.post("/pause_generation", mode="retract")
        await engine.post("/begin_weight_update")
        body = described(load_file(file)) | {"group_name": name, "weight_version": "v2.0", "load_format": load_format}
        updating = asyncio.create_task(engine.post("/update_weights_from_distributed", **body))
        broadcast()
        status, answer = await updating
        assert (status, answer["success"]) == (200, True), answer
        await engine.post("/end_weight_update")
        await engine.post("/continue_generation")
        spans = (await running.end())["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "v2.0"]
        by_group = await checksum(engine)
        assert (await engine.post("/destroy_weights_update_group", group_name=name))[0] == 200
    await engine.load("b", weight_version="v2.1")
    assert await checksum(engine) == by_group


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


@asynccontextmanager
async def trainer(file: Path, name: str, load_format: str) -> AsyncIterator[tuple[int, Any, Any]]:
    """The trainer as a process: its port, how to wait until it has joined, and how to make it broadcast."""
    words = [sys.executable, str(Path(__file__).with_name("engine_trainer.py")), str(file), name, load_format]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*words, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    yield port, process.stdout.readline, lambda: process.stdin and process.stdin.write(b"go\n")
    await process.communicate(b"end\n")
