"""Adapters (LoRA) at an engine: what a request names is what answers it, and nothing else may be named."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import logprobs_with, write_adapter
from engine_client import PROMPT, Engine

TOLERANCE = {"builtin": 1e-4, "sglang": 2e-3}
SAMPLING = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="session")
def adapters(models: Path) -> dict[str, Path]:
    """Two adapters of model `a`; the second leaves some layers alone."""
    few = ("q_proj", "v_proj", "down_proj")
    return {
        "first": write_adapter(models / "adapters" / "first", models / "a", seed=1),
        "second": write_adapter(models / "adapters" / "second", models / "a", seed=2, targets=few),
    }


@pytest.fixture
async def engine(lora_server: tuple[str, str], models: Path) -> AsyncIterator[Engine]:
    kind, url = lora_server
    async with Engine.open(kind, url, models) as engine:
        for name in await loaded(engine):
            await engine.post("/unload_lora_adapter", lora_name=name)
        yield engine


async def loaded(engine: Engine) -> dict[str, str]:
    """Folder by name, as the list of models tells it."""
    _, models = await engine.get("/v1/models")
    return {card["id"]: card["root"] for card in models["data"][1:]}


async def load(engine: Engine, adapters: dict[str, Path], *names: str) -> None:
    for name in names:
        status, reply = await engine.post("/load_lora_adapter", lora_name=name, lora_path=str(adapters[name]))
        assert (status, reply["success"]) == (200, True), reply


def check(engine: Engine, result: Any, adapter: Path | None) -> None:
    ids = PROMPT + result["output_ids"]
    expected = logprobs_with(engine.models / "a", adapter, ids)[len(PROMPT) - 1 :]
    got = [logprob for logprob, _, _ in result["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[engine.kind])


async def test_what_is_loaded_is_told(engine: Engine, adapters: dict[str, Path]) -> None:
    await load(engine, adapters, "first", "second")
    assert await loaded(engine) == {name: str(path) for name, path in adapters.items()}
    _, models = await engine.get("/v1/models")
    assert {card["parent"] for card in models["data"][1:]} == {models["data"][0]["id"]}
    assert (await engine.post("/unload_lora_adapter", lora_name="first"))[0] == 200
    assert list(await loaded(engine)) == ["second"]


async def test_each_request_is_answered_by_what_it_names(engine: Engine, adapters: dict[str, Path]) -> None:
    """Also when they share a forward pass, and when the same prompt was computed with another adapter before."""
    await load(engine, adapters, "first", "second")
    names = [None, "first", "second", "first", None, "second"]
    work = [engine.generate(SAMPLING, **({"lora_path": name} if name else {})) for name in names]
    for name, result in zip(names, await asyncio.gather(*work), strict=True):
        check(engine, result, adapters[name] if name else None)


async def test_a_batch_may_name_several(engine: Engine, adapters: dict[str, Path]) -> None:
    await load(engine, adapters, "first", "second")
    names = ["first", "second"]
    results = await engine.generate(SAMPLING, input_ids=[PROMPT, PROMPT], lora_path=names)
    for name, result in zip(names, results, strict=True):
        check(engine, result, adapters[name])


async def test_an_unknown_adapter_is_refused(engine: Engine, adapters: dict[str, Path]) -> None:
    error = await engine.refused(lora_path="zz", input_ids=PROMPT)
    assert "never been loaded: zz" in str(error)
    if engine.kind == "sglang":
        return  # it loads one that it has known again
    await load(engine, adapters, "first")
    await engine.post("/unload_lora_adapter", lora_name="first")
    await engine.refused(lora_path="first", input_ids=PROMPT)


async def test_a_name_is_given_once(engine: Engine, adapters: dict[str, Path]) -> None:
    await load(engine, adapters, "first")
    status, reply = await engine.post("/load_lora_adapter", lora_name="first", lora_path=str(adapters["second"]))
    assert (status, reply["success"]) == (400, False)
    assert "already loaded" in reply["error_message"]
    assert await loaded(engine) == {"first": str(adapters["first"])}
    assert (await engine.post("/unload_lora_adapter", lora_name="second"))[0] == 400


async def test_a_name_that_comes_back_with_other_content_does_not_find_the_old_cache(
    engine: Engine, adapters: dict[str, Path]
) -> None:
    for name in ("first", "second"):
        body = {"lora_name": "same", "lora_path": str(adapters[name])}
        assert (await engine.post("/load_lora_adapter", **body))[0] == 200
        check(engine, await engine.generate(SAMPLING, lora_path="same"), adapters[name])
        assert (await engine.post("/unload_lora_adapter", lora_name="same"))[0] == 200


@pytest.mark.parametrize("fault", ["nothing there", "outside", "shape", "unknown layer", "no rank", "biases"])
async def test_an_adapter_that_does_not_fit_is_refused(
    engine: Engine, adapters: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    if engine.kind != "builtin":
        pytest.skip("how SGLang takes broken adapters is its own affair")
    folder = broken(engine.models, fault, tmp_path)
    status, reply = await engine.post("/load_lora_adapter", lora_name="broken", lora_path=str(folder))
    assert (status, reply["success"], await loaded(engine)) == (400, False, {})
    assert reply["error_message"]


def broken(models: Path, fault: str, outside: Path) -> Path:
    """An adapter with a fault."""
    import json

    from safetensors.torch import load_file, save_file

    folder = (outside if fault == "outside" else models / "adapters") / fault.replace(" ", "-")
    if fault == "nothing there":
        return folder
    if fault == "outside":
        return write_adapter(folder, models / "a", seed=3)
    write_adapter(folder, models / "a", seed=3)
    file, config_file = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    first = next(iter(tensors))
    if fault == "shape":
        tensors[first] = tensors[first][:, :-1].contiguous()
    elif fault == "unknown layer":
        tensors["base_model.model.nowhere.lora_A.weight"] = tensors[first].clone()
    elif fault == "no rank":
        del config["r"]
    else:
        config["bias"] = "all"
    save_file(tensors, file)
    config_file.write_text(json.dumps(config))
    return folder
