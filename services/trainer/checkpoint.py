"""Checkpoints from which a run continues: a folder for each version, complete or absent.

    .v1.40.saving/ -- rename --> v1.40/ -- latest (a file with the label, replaced by rename)
      tensors of every rank (torch.distributed.checkpoint), trainer.json, then manifest.json, all fsynced

Decides: which checkpoint a run continues from, and which may go.
Guarantee: a folder named by a version label held every byte of its manifest when it got its name, and `latest` names
the newest such folder. What is torn or corrupt is named in the log and skipped, never loaded. A leader whose lease has
passed can only add a checkpoint of its own, older term: it changes none of its successor's.
Proved in test_checkpoint_store.py.
"""

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway.core.version import LABEL, PolicyVersion
from headway.runtime.published import MANIFEST
from services.trainer.files import sync_folder, write_file

RECORD = "trainer.json"
LATEST = "latest"
FINISHED = "finished"
HASH_THREADS = 4
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """What a run continues from, beside tensors."""

    version: PolicyVersion
    """The weights; its step is the step that is trained next."""
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """Cursor of the dataset and ledger of tasks."""
    num_skipped_steps: int = 0
    num_samples: int = 0
    """Sequences trained on so far."""
    trained_s: float = 0.0
    """Wall time of all steps so far, seconds."""
    unlogged: dict[str, float] | None = None
    """Statistics of the step that made these weights, where an evaluation was to be added to them; None: written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    record: TrainerRecord


class CheckpointStore:
    """The folder below which every checkpoint has its own folder.

    Args:
        root: Shared by all ranks and all candidates.
        keep_last: Complete checkpoints that stay.
        mark: Told of each point that a save has reached.
    """

    def __init__(self, root: Path, keep_last: int, mark: Callable[[str], None] = lambda _: None) -> None:
        self.root = root
        self._keep_last = keep_last
        self._mark = mark

    def begin(self, version: PolicyVersion) -> Path:
        """An empty folder for the tensors of all ranks."""
        self.root.mkdir(parents=True, exist_ok=True)
        aside = self.root / f".{version.label}.saving-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        return aside

    def complete(self, aside: Path, record: TrainerRecord) -> Path:
        """Give a folder that holds the tensors its name, after everything in it is on disk."""
        self._mark("checkpoint tensors written")
        write_file(aside / RECORD, [memoryview(json.dumps(asdict(record)).encode())])
        manifest = {"version": record.version.label, "files": list(_described(aside))}
        self._mark("checkpoint hashed")
        write_file(aside / MANIFEST, [memoryview(json.dumps(manifest, indent=1).encode())])
        sync_folder(aside)
        path = self.root / record.version.label
        if path.exists():  # of an earlier life of this term, or corrupt: what we hold is good
            self._remove(path)
        aside.rename(path)
        self._mark("checkpoint named")
        self._write_small(LATEST, self._versions()[-1].label)
        sync_folder(self.root)
        self._mark("checkpoint latest")
        self._remove_old()
        return path

    def is_gone(self, aside: Path, version: PolicyVersion) -> bool:
        """Whether a checkpoint in the making was removed, as the next leader does with what it finds half-written."""
        return not aside.exists() and not (self.root / version.label).exists()

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; None where there is none."""
        for version in reversed(self._versions()):
            path = self.root / version.label
            fault = find_fault(path)
            if fault is None:
                return Checkpoint(path, read_record(path))
            log.warning("checkpoint %s is skipped: %s", path, fault)
        return None

    def mark_finished(self, is_finished: bool) -> None:
        """Remember whether the run came to its end."""
        self.root.mkdir(parents=True, exist_ok=True)
        if is_finished:
            self._write_small(FINISHED, "")
        else:
            (self.root / FINISHED).unlink(missing_ok=True)

    @property
    def is_finished(self) -> bool:
        return (self.root / FINISHED).exists()

    def remove_leftovers(self) -> None:
        """Remove half-written checkpoints of processes that are gone."""
        if self.root.exists():
            for path in [*self.root.glob(".v*.saving-*"), *self.root.glob(".v-gone-*")]:
                shutil.rmtree(path, ignore_errors=True)

    def _versions(self) -> list[PolicyVersion]:
        if not self.root.exists():
            return []
        return sorted(PolicyVersion.parse(path.name) for path in self.root.iterdir() if LABEL.fullmatch(path.name))

    def _remove_old(self) -> None:
        for version in self._versions()[: -self._keep_last]:
            self._remove(self.root / version.label)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f".v-gone-{path.name}-{os.getpid()}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _write_small(self, name: str, content: str) -> None:
        aside = self.root / f".{name}-{os.getpid()}"
        write_file(aside, [memoryview(content.encode())])
        aside.replace(self.root / name)


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint's folder, in words; None: it holds every byte that its manifest names."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = [(path / file["name"], file["bytes"], file["sha256"]) for file in manifest["files"]]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} cannot be read"
    for file, size, _ in files:
        if not file.exists():
            return f"{file.name} is missing"
        if file.stat().st_size != size:
            return f"{file.name} has {file.stat().st_size} bytes, not {size}"
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for (file, _, expected), found in zip(files, pool.map(_sha256, [file for file, _, _ in files]), strict=True):
            if found != expected:
                return f"{file.name} is corrupt"
    return None


def read_record(path: Path) -> TrainerRecord:
    content = json.loads((path / RECORD).read_bytes())
    content["version"] = PolicyVersion(*content["version"])
    return TrainerRecord(**content)


def copy_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it is now, in host memory: what trains on afterwards does not change it."""
    return {
        name: copy_tensors(value) if isinstance(value, dict) else value.detach().to("cpu", copy=True)
        for name, value in state.items()
    }


def save_tensors(folder: Path, state: dict[str, Any], group: "dist.ProcessGroup | None" = None) -> None:
    """Write the tensors of all ranks; every rank calls it, and it returns when all have written.

    Args:
        group: In which the ranks agree; None: the default one, which nothing else may use meanwhile.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _alone_is_fine():
        save(state, storage_writer=writer, process_group=group)


def load_tensors(folder: Path, state: dict[str, Any]) -> None:
    """Read tensors into `state`, in place, whatever the number of ranks that wrote them; every rank calls it."""
    with _alone_is_fine():
        load(state, storage_reader=FileSystemReader(folder))


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without a process group torch works alone and warns that it does."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def _described(folder: Path) -> Iterator[dict[str, object]]:
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for file, sha256 in zip(files, pool.map(_sha256, files), strict=True):
            yield {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
