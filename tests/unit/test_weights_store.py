"""A folder named by a version is complete, hashed as its manifest says, readable as safetensors, never half there."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from services.trainer import files, weights
from services.trainer.weights import WeightStore, read_manifest

TENSORS = [
    ("embed", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("scale", torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16)),
    ("bias", torch.tensor(3.0)),
    ("strided", torch.arange(6.0).reshape(2, 3).t()),
    ("empty", torch.zeros(0, 4)),
]
STATIC = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", STATIC)


def test_what_is_written_is_what_safetensors_reads(store: WeightStore) -> None:
    written = store.write(PolicyVersion(1, 3), PolicyVersion(1, 2), TENSORS)
    read = load_file(written.path / "model.safetensors")
    assert set(read) == {name for name, _ in TENSORS}
    for name, tensor in TENSORS:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_manifest_names_every_byte_of_the_folder(store: WeightStore) -> None:
    written = store.write(PolicyVersion(1, 3), PolicyVersion(1, 2), TENSORS)
    manifest, sha256 = read_manifest(written.path)
    assert sha256 == written.manifest_sha256
    assert manifest["version"] == {"term": 1, "step": 3}
    assert manifest["parent"] == "v1.2"
    assert manifest["dtype"] == "bfloat16+float32"
    files = {file["name"]: file for file in manifest["files"]}
    assert set(files) | {"manifest.json"} == {path.name for path in written.path.iterdir()}
    for name, file in files.items():
        data = (written.path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])


def test_large_models_are_sharded_with_an_index(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 64)
    written = store.write(PolicyVersion(1, 0), None, TENSORS)
    index = json.loads((written.path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert all("-of-" in name for name in index.values())
    for name, tensor in TENSORS:
        assert torch.equal(load_file(written.path / index[name])[name], tensor)


def test_a_failure_half_way_leaves_no_folder_with_the_versions_name(store: WeightStore) -> None:
    def broken() -> object:
        yield TENSORS[0]
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        store.write(PolicyVersion(1, 1), None, broken())
    assert store.versions() == []
    store.remove_leftovers(term=1)
    assert [path.name for path in store.root.iterdir() if path.name.startswith(".v")] == []


def test_one_version_is_written_once(store: WeightStore) -> None:
    store.write(PolicyVersion(1, 1), None, TENSORS)
    with pytest.raises(InvalidInput, match=r"v1\.1 exists already"):
        store.write(PolicyVersion(1, 1), None, TENSORS)


def test_versions_in_use_and_the_newest_stay(store: WeightStore) -> None:
    for step in range(6):
        store.write(PolicyVersion(1, step), None, TENSORS)
    removed = store.remove_except({PolicyVersion(1, 1)}, keep_newest=2)
    assert removed == [PolicyVersion(1, 0), PolicyVersion(1, 2), PolicyVersion(1, 3)]
    assert store.versions() == [PolicyVersion(1, 1), PolicyVersion(1, 4), PolicyVersion(1, 5)]


def test_a_new_term_removes_only_what_cannot_have_been_published(store: WeightStore) -> None:
    for version in (PolicyVersion(1, 7), PolicyVersion(2, 0), PolicyVersion(3, 1)):
        store.write(version, None, TENSORS)
    store.remove_leftovers(term=2)
    assert store.versions() == [PolicyVersion(1, 7)]


def test_static_files_are_copied_where_links_are_not_possible(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(files.os, "link", refuse)
    written = store.write(PolicyVersion(1, 0), None, TENSORS)
    assert (written.path / "config.json").read_bytes() == STATIC["config.json"]


def test_a_base_stays_for_as_long_as_an_adapter_needs_it(store: WeightStore) -> None:
    config = {"r": 4}
    first = store.write_base(TENSORS)
    store.write_adapter(PolicyVersion(1, 0), None, TENSORS[:1], config)
    second = store.write_base(TENSORS[:3])
    assert first != second
    for step in (1, 2):
        written = store.write_adapter(PolicyVersion(1, step), None, TENSORS[:1], config)
        assert read_manifest(written.path)[0]["base"] == second.name
    store.remove_except([], keep_newest=3)
    assert (first.exists(), second.exists()) == (True, True)
    store.remove_except([], keep_newest=2)
    assert (first.exists(), second.exists()) == (False, True)


def test_a_base_with_the_same_bytes_is_kept_as_it_is(store: WeightStore) -> None:
    path = store.write_base(TENSORS)
    before = path.stat().st_ino
    assert store.write_base(TENSORS) == path
    assert path.stat().st_ino == before
    assert not list(store.root.glob(".base-*"))


def test_an_adapter_is_written_as_peft_reads_it(store: WeightStore) -> None:
    store.write_base(TENSORS)
    written = store.write_adapter(PolicyVersion(1, 1), PolicyVersion(1, 0), TENSORS, {"r": 4})
    assert set(load_file(written.path / "adapter_model.safetensors")) == {name for name, _ in TENSORS}
    assert json.loads((written.path / "adapter_config.json").read_text()) == {"r": 4}
