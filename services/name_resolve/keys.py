"""How names, versions and terms lie in a store: the key of each, and the bytes under it.

    /headway/names/{name}/         an entry: value, metadata, owner, time
    /headway/versions/{run}/       the published version of a run
    /headway/terms/{office}/       the last leadership of an office: term, fencing token, candidate

Values are JSON, so that `etcdctl get --prefix /headway` is readable.
"""

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from services.name_resolve.store import Item

ROOT = "/headway/"
NAMES = "/headway/names/"
VERSIONS = "/headway/versions/"
TERMS = "/headway/terms/"
MAX_NAME_BYTES = 1024
MAX_VALUE_BYTES = 1024 * 1024
TRAINER_OFFICE = "leader/trainer"
"""Below a run: whose leader may publish the run's versions."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is stored under a name."""

    value: str
    metadata: dict[str, str] = field(default_factory=dict)
    owner: str = ""
    registered_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Published:
    """What is stored as a run's version."""

    term: int
    step: int
    manifest_sha256: str
    fencing_token: int
    published_at: float
    sequence: int

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.term, self.step)


@dataclass(frozen=True, slots=True)
class Leadership:
    """What is stored as an office's last leadership."""

    term: int
    fencing_token: int
    candidate: str


def clean(name: str, *, may_be_empty: bool = False) -> str:
    """A name without slashes at its ends.

    Raises:
        InvalidInput: It is empty, too long, or has an empty, `.` or `..` segment or an unprintable character.
    """
    name = name.strip("/")
    if not name:
        if may_be_empty:
            return name
        raise InvalidInput("a name is missing")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidInput(f"the name {name[:40]}... is longer than {MAX_NAME_BYTES} bytes")
    if not name.isprintable() or any(segment in ("", ".", "..") for segment in name.split("/")):
        raise InvalidInput(f"{name!r} is not a name: segments between slashes, none empty, `.` or `..`")
    return name


def key_of(space: str, name: str) -> str:
    """The key of a name, or of the prefix that is it and everything below it; an empty name is the whole space."""
    return f"{space}{name}/" if name else space


def name_of(space: str, key: str) -> str:
    return key.removeprefix(space).removesuffix("/")


def to_bytes(record: Record | Published | Leadership) -> bytes:
    return orjson.dumps(asdict(record))


def record_of(item: Item) -> Record:
    return Record(**_fields(item))


@lru_cache(maxsize=256)
def published_of(item: Item) -> Published:
    return Published(**_fields(item))


def leadership_of(item: Item) -> Leadership:
    return Leadership(**_fields(item))


def _fields(item: Item) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(item.value)
    return fields
