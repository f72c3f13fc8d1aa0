"""What the fleet needs of an engine server, in whichever dialect, and the kinds in which a call to one fails."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headway.core.version import PolicyVersion
from headway.errors import HeadwayError, InvalidInput, Overloaded, Unavailable
from services.rollout_controller.piece import Piece, Update
from services.rollout_controller.weight_source import Group


class ServerFailed(Unavailable):
    """A server did not answer, broke off, or answered 5xx."""


class ServerSilent(ServerFailed):
    """No answer in time: the server hangs, is cut off, or is slow."""


class ServerGone(ServerFailed):
    """The connection was refused or broke: the process, or the way to it, is gone."""


class ServerBusy(Overloaded):
    """A server's queue is full."""


class RequestRefused(InvalidInput):
    """A server answered 4xx: the request is wrong, and would be anywhere."""


class UpdateFailed(HeadwayError):
    """A server did not take the weights, or does not report them."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself."""

    label: str
    """The version that it serves."""
    context_length: int | None = None
    has_tokenizer: bool = True
    """Without one it knows no stop strings."""


class Dialect(Protocol):
    """One server, spoken to in its engine's HTTP dialect."""

    kind: str
    takes_batches: bool
    """Several pieces may travel in one call."""
    ends_requests: bool
    """Its `pause` holds nothing: it ends what runs, and has to be repeated until nothing does."""

    def generate_call(self, pieces: Sequence[Piece]) -> tuple[str, dict[str, Any]]:
        """Path and body of the call that streams these pieces.

        Raises:
            InvalidInput: The server's settings cannot give what the sampling parameters ask for.
        """
        ...

    def read(self, event: dict[str, Any], pieces: Sequence[Piece]) -> Update:
        """Read one event of the stream that these pieces share.

        Raises:
            KeyError, TypeError, ValueError: It is not of the dialect's form.
            Contradiction: It says that other weights were used than the piece asked for.
        """
        ...

    async def abort(self, rid: str) -> None:
        """End a request early; its tokens come through its stream."""
        ...

    async def is_ready(self, timeout_s: float) -> bool:
        """Whether it would take requests; without generating.

        Raises:
            ServerSilent, ServerGone: It does not answer.
        """
        ...

    async def facts(self) -> Facts:
        """Raises: ServerFailed."""
        ...

    async def prepare(self, version: PolicyVersion, folder: Path) -> None:
        """Do what of a load can be done while requests run.

        Raises:
            UpdateFailed: The weights cannot be loaded.
        """
        ...

    async def pause(self) -> None:
        """Hold generation such that weights can be changed, and none of the old ones' cache is used afterwards."""
        ...

    async def load(self, version: PolicyVersion, folder: Path) -> None:
        """Load weights, paused.

        Raises:
            UpdateFailed: They were not loaded.
        """
        ...

    async def resume(self) -> None: ...


@runtime_checkable
class Broadcasts(Protocol):
    """A dialect that can also receive weights in a process group."""

    async def join_group(self, group: Group, rank: int) -> None:
        """Returns when every member has joined.

        Raises:
            UpdateFailed, ServerFailed: It could not.
        """
        ...

    async def leave_group(self, name: str) -> None: ...

    async def receive(self, group: Group, version: PolicyVersion) -> None:
        """Receive all buckets, and report the version.

        Raises:
            UpdateFailed, ServerFailed: The weights may be those of neither version.
        """
        ...
