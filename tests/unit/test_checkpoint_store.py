"""The checkpoint that a run continues from is always a complete one, whatever was torn, corrupted or written late."""

import shutil
from pathlib import Path

import pytest
import torch

from headway.core.version import PolicyVersion
from services.trainer.checkpoint import CheckpointStore, TrainerRecord, load_tensors, save_tensors


def state(value: float) -> dict[str, object]:
    return {"model": {"weight": torch.full((4, 3), value)}, "optimizer": {"step": torch.tensor(value)}, "lr": value}


def save(store: CheckpointStore, term: int, step: int) -> Path:
    version = PolicyVersion(term, step)
    aside = store.begin(version)
    save_tensors(aside, state(float(step)))
    return store.complete(aside, TrainerRecord(version, {"cursor": step}, num_samples=8 * step))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "recover", keep_last=3)


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    save(store, 1, 4)
    newest = store.newest()
    assert newest is not None
    assert newest.record == TrainerRecord(PolicyVersion(1, 4), {"cursor": 4}, num_samples=32)
    loaded = state(0.0)
    load_tensors(newest.path, loaded)
    assert torch.equal(loaded["model"]["weight"], torch.full((4, 3), 4.0))
    assert loaded["lr"] == 4.0
    assert (store.root / "latest").read_text() == "v1.4"


def test_without_a_checkpoint_there_is_none(store: CheckpointStore) -> None:
    assert store.newest() is None


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "missing file", "short file", "flipped bit"])
def test_a_damaged_checkpoint_is_named_and_skipped(
    store: CheckpointStore, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1, 1)
    newest = save(store, 1, 2)
    tensors = next(newest.glob("*.distcp"))
    data = tensors.read_bytes()
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "torn manifest":
        (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:40])
    elif damage == "missing file":
        tensors.unlink()
    elif damage == "short file":
        tensors.write_bytes(data[:-1])
    else:
        tensors.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    found = store.newest()
    assert found is not None
    assert found.record.version == PolicyVersion(1, 1)
    assert "v1.2 is skipped" in caplog.text


def test_a_save_that_dies_half_way_leaves_the_older_checkpoint_newest(tmp_path: Path) -> None:
    points = ["checkpoint tensors written", "checkpoint hashed", "checkpoint named", "checkpoint latest"]
    for point in points:
        root = tmp_path / point.replace(" ", "-")
        save(CheckpointStore(root, keep_last=3), 1, 1)

        def die(reached: str, point: str = point) -> None:
            if reached == point:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            save(CheckpointStore(root, keep_last=3, mark=die), 1, 2)
        survivor = CheckpointStore(root, keep_last=3)
        survivor.remove_leftovers()
        newest = survivor.newest()
        assert newest is not None
        is_named = point in ("checkpoint named", "checkpoint latest")
        assert newest.record.version == PolicyVersion(1, 2 if is_named else 1)
        assert not list(root.glob(".v*"))


def test_only_the_last_ones_stay(store: CheckpointStore) -> None:
    for step in range(5):
        save(store, 1, step)
    assert sorted(path.name for path in store.root.glob("v*")) == ["v1.2", "v1.3", "v1.4"]


def test_a_late_checkpoint_of_an_older_leader_changes_nothing(store: CheckpointStore) -> None:
    old_leaders = store.begin(PolicyVersion(1, 9))
    save_tensors(old_leaders, state(9.0))
    save(store, 2, 7)
    store.complete(old_leaders, TrainerRecord(PolicyVersion(1, 9)))
    newest = store.newest()
    assert newest is not None
    assert newest.record.version == PolicyVersion(2, 7)
    assert (store.root / "latest").read_text() == "v2.7"


def test_a_corrupt_checkpoint_of_the_same_version_is_replaced(store: CheckpointStore) -> None:
    path = save(store, 1, 3)
    shutil.rmtree(path)
    path.mkdir()
    save(store, 1, 3)
    assert store.newest() is not None


def test_a_finished_run_is_remembered(store: CheckpointStore) -> None:
    assert not store.is_finished
    store.mark_finished(True)
    assert store.is_finished
    store.mark_finished(False)
    assert not store.is_finished
