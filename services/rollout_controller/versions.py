"""Which versions were published, what their manifests say, how the fleet was moved to them, and who serves each.

The newest are kept in memory. Those that an earlier life of this process saw are known from their folders, for as long
as the trainer leaves them there; when they were published is then the time of their manifest.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headway.core.version import LABEL, PolicyVersion
from headway.errors import InvalidInput, NotFound
from headway.runtime.names import VersionRecord
from headway.runtime.published import MANIFEST
from services.rollout_controller.fleet_status import FleetSnapshot, MoveReport
from services.rollout_controller.views import FileStatus, MoveStatus, VersionDetail, VersionPage, VersionStatus

MAX_KEPT = 4096


@dataclass(slots=True)
class KnownVersion:
    """A version that was published."""

    version: PolicyVersion
    published_at: float
    manifest_sha256: str
    parent: str | None = None
    files: list[FileStatus] | None = None
    """None: its manifest was not seen."""
    move: MoveStatus | None = None


@dataclass
class VersionBook:
    """The versions of a run.

    Args:
        root: Holds a folder for each.
        snapshot: The fleet now.
    """

    root: Path
    snapshot: Callable[[], FleetSnapshot]
    _known: dict[PolicyVersion, KnownVersion] = field(default_factory=dict)

    async def start(self) -> None:
        """Take up what has a folder already."""
        for known in await asyncio.to_thread(lambda: list(_on_disk(self.root))):
            self._known.setdefault(known.version, known)

    async def add(self, record: VersionRecord) -> None:
        """A version was published."""
        known = KnownVersion(record.version, record.published_at, record.manifest_sha256)
        self._known[record.version] = known
        if len(self._known) > MAX_KEPT:
            del self._known[min(self._known)]
        found = await asyncio.to_thread(_read_folder, self.root / record.version.label)
        if found is not None:
            known.parent, known.files = found.parent, found.files

    def moved(self, report: MoveReport) -> None:
        """The fleet was moved to a version."""
        known = self._known.get(report.version)
        if known is not None:
            known.move = MoveStatus(
                num_moved=report.num_moved,
                num_out=report.num_out,
                prepare_s=report.prepare_s,
                pause_s=report.pause_s,
                load_s=report.load_s,
                total_s=report.total_s,
            )

    def page(self, before: str | None, limit: int) -> VersionPage:
        """Versions older than `before`, newest first.

        Raises:
            InvalidInput: It is no version.
        """
        ordered = sorted(self._known, reverse=True)
        if before is not None:
            start = parse(before)
            ordered = [version for version in ordered if version < start]
        shown, serving = ordered[:limit], self._serving()
        pages = [VersionStatus(**self._fields(self._known[version], serving)) for version in shown]
        return VersionPage(versions=pages, next=shown[-1].label if len(ordered) > limit else None)

    def detail(self, label: str) -> VersionDetail:
        """
        Raises:
            InvalidInput: It is no version.
            NotFound: It was not published, or long ago.
        """
        known = self._known.get(parse(label))
        if known is None:
            raise NotFound(f"no version {label} is known")
        return VersionDetail(**self._fields(known, self._serving()), files=known.files or [])

    def _serving(self) -> Mapping[str | None, list[str]]:
        serving: dict[str | None, list[str]] = {}
        for engine in self.snapshot().engines:
            serving.setdefault(engine.version, []).append(engine.name)
        return serving

    @staticmethod
    def _fields(known: KnownVersion, serving: Mapping[str | None, list[str]]) -> dict[str, Any]:
        return {
            "version": known.version.label,
            "step": known.version.step,
            "published_at": known.published_at,
            "manifest_sha256": known.manifest_sha256,
            "parent": known.parent,
            "num_files": None if known.files is None else len(known.files),
            "num_bytes": None if known.files is None else sum(file.num_bytes for file in known.files),
            "served_by": sorted(serving.get(known.version.label, [])),
            "fleet_update": known.move,
        }


def parse(label: str) -> PolicyVersion:
    """Read a label that came from outside.

    Raises:
        InvalidInput: It is no version.
    """
    try:
        return PolicyVersion.parse(label)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def _on_disk(root: Path) -> Iterable[KnownVersion]:
    folders = root.iterdir() if root.is_dir() else []
    found = (_read_folder(folder) for folder in folders if LABEL.fullmatch(folder.name))
    return (known for known in found if known is not None)


def _read_folder(folder: Path) -> KnownVersion | None:
    """What a version's folder says; None where it is gone, or says nothing."""
    path = folder / MANIFEST
    try:
        data, at = path.read_bytes(), path.stat().st_mtime
        manifest = orjson.loads(data)
        files = [
            FileStatus(name=file["name"], num_bytes=file["bytes"], sha256=file["sha256"]) for file in manifest["files"]
        ]
    except (OSError, ValueError, KeyError):
        return None
    sha256 = hashlib.sha256(data).hexdigest()
    return KnownVersion(PolicyVersion.parse(folder.name), at, sha256, manifest.get("parent"), files)
