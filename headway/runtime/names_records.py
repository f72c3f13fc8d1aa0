"""What name-resolve tells its clients: entries, changes, published versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.core.version import PolicyVersion
from headway.v1 import name_resolve_pb2 as pb


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered name."""

    name: str
    """Below the client's run."""
    value: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    registered_at: float = 0.0
    """Unix seconds."""
    revision: int = 0
    """Of its last change."""
    create_revision: int = 0
    """Of its coming to be: another one means that its owner has started again."""
    lease_id: int = 0
    """0: does not lapse."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at and below the prefix, in the order of the names; forget what you knew."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """A name that is new or has changed."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Removed:
    """A name that is gone: deregistered, or its lease has lapsed."""

    name: str


NameEvent = Snapshot | Put | Removed


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A published version."""

    version: PolicyVersion
    manifest_sha256: str
    fencing_token: int
    published_at: float
    """Unix seconds."""
    sequence: int
    """1 for the run's first publication, then one more for each."""
    run: str = ""
    has_gap: bool = False
    """In a watch: versions between the one before and this one were not seen."""


def entry_from_wire(message: pb.Entry, root: str) -> Entry:
    """Read an entry; its name becomes relative to `root`."""
    return Entry(
        relative(message.name, root),
        message.value,
        dict(message.metadata),
        message.registered_at,
        message.revision,
        message.create_revision,
        message.lease_id,
    )


def events_from_wire(reply: pb.WatchReply, root: str) -> list[NameEvent]:
    """The events of one reply, in order."""
    events: list[NameEvent] = []
    if reply.HasField("snapshot"):
        events.append(Snapshot(tuple(entry_from_wire(entry, root) for entry in reply.snapshot.entries)))
    for change in reply.changes:
        if change.HasField("put"):
            events.append(Put(entry_from_wire(change.put, root)))
        else:
            events.append(Removed(relative(change.removed, root)))
    return events


def version_record_from_wire(message: pb.VersionRecord, has_gap: bool = False) -> VersionRecord:
    return VersionRecord(
        PolicyVersion(message.version.term, message.version.step),
        message.manifest_sha256,
        message.fencing_token,
        message.published_at,
        message.sequence,
        message.run,
        has_gap,
    )


def relative(name: str, root: str) -> str:
    return name.removeprefix(f"{root}/") if root else name
