"""Where an adapter is trained, versions are adapters: the base is written once, recovery and export work as ever."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_trainer_service import train_to_the_end, weights_of
from trainer_harness import Stage, Zygote, stage, zygote

from headway.runtime.published import read_published
from services.trainer.weights import read_manifest

STEPS = 4
LORA: dict[str, Any] = {
    "actor": {"use_lora": True, "lora_rank": 4, "lora_alpha": 8},
    "recover": {"mode": "auto", "freq_steps": 2, "keep_last": 2},
}


@pytest.fixture
async def forks(tmp_path: Path) -> AsyncIterator[Zygote]:
    async with zygote(tmp_path / "zygote.log") as forks:
        yield forks


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def merged(version: Path, scaling: float) -> dict[str, np.ndarray]:
    """Base and adapter of a version, added up by the definition."""
    base = load_file(read_published(version).model / "model.safetensors")
    adapter = load_file(version / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in adapter}:
        change = adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
        base[f"{name.removeprefix('base_model.model.')}.weight"] += scaling * change
    return base


async def test_versions_are_adapters_and_the_base_is_written_once(tmp_path: Path) -> None:
    async with stage(tmp_path, steps=3, **LORA) as trial:
        await train_to_the_end(trial)
        paths = trial.config.paths
        (base,) = paths.weights.glob("base-*")
        versions = [paths.weights / f"v1.{step}" for step in range(4)]
        for version in versions:
            assert {file.name for file in version.iterdir()} == {
                "adapter_model.safetensors", "adapter_config.json", "manifest.json"
            }  # fmt: skip
            assert read_published(version).model == base
        first, last = (load_file(version / "adapter_model.safetensors") for version in (versions[0], versions[-1]))
        assert all(not value.any() for name, value in first.items() if "lora_B" in name)
        assert any(not np.array_equal(first[name], last[name]) for name in first)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in base.iterdir()}
        exported = weights_of(paths.checkpoints / "v1.3")
        for name, value in merged(versions[-1], scaling=2.0).items():
            np.testing.assert_allclose(exported[name], value, atol=1e-6)


def lora_weights(trial: Stage, term: int) -> dict[str, np.ndarray]:
    return load_file(trial.config.paths.weights / f"v{term}.{STEPS}" / "adapter_model.safetensors")


@pytest.mark.parametrize(("point", "occurrence"), [("end publish", 4), ("mark checkpoint named", 1)])
async def test_a_killed_run_ends_with_the_adapter_of_the_uninterrupted_one(
    forks: Zygote, tmp_path: Path, point: str, occurrence: int
) -> None:
    """And its base is the same one: no engine has to load it again."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    async with stage(tmp_path / "whole", steps=STEPS, **LORA) as trial:
        assert await (await forks.start(trial)).ended == 0
        expected = lora_weights(trial, term=1)
    async with stage(tmp_path / "killed", steps=STEPS, **LORA) as trial:
        assert await (await forks.start(trial, point, occurrence)).ended == -9
        (before,) = trial.config.paths.weights.glob("base-*")
        written = before.stat().st_ino
        assert await (await forks.start(trial)).ended == 0
        (after,) = trial.config.paths.weights.glob("base-*")
        assert (after, after.stat().st_ino) == (before, written)
        found = lora_weights(trial, term=2)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not list(trial.config.paths.weights.glob(".*"))


async def test_a_version_costs_the_adapters_bytes(tmp_path: Path) -> None:
    changes = {**LORA, "actor": {"use_lora": True, "lora_rank": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}}
    async with stage(tmp_path, steps=1, **changes) as trial:
        await train_to_the_end(trial)
        weights = trial.config.paths.weights
        manifest, _ = read_manifest(weights / "v1.1")
    tensors = next(file for file in manifest["files"] if file["name"] == "adapter_model.safetensors")  # type: ignore[attr-defined]
    (base,) = weights.glob("base-*")
    assert tensors["bytes"] < 2 * (16 + 16) * 4 + 1024
    assert size_of(weights / "v1.1") * 10 < size_of(base)
