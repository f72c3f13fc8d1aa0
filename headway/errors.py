"""Every error raised on purpose, and the status it travels as.

    HeadwayError
    +-- InvalidInput    INVALID_ARGUMENT     400   the caller must change what it gave; the message says where
    +-- NotFound        NOT_FOUND            404
    +-- AlreadyExists   ALREADY_EXISTS       409   the name is taken
    +-- StaleVersion    FAILED_PRECONDITION  409   a newer policy or leader exists; the message names the current one
    +-- Overloaded      RESOURCE_EXHAUSTED   429   retry with backoff
    +-- Unavailable     UNAVAILABLE          503   a dependency is down; retry with backoff
    +-- TimedOut        DEADLINE_EXCEEDED    504   the message names what was waited for
    +-- Refused         PERMISSION_DENIED    403   not allowed for this caller
    +-- Unauthenticated UNAUTHENTICATED      401   the caller must show its token

Anything else is a bug: INTERNAL / 500 to the caller, a traceback in the log.
"""

from typing import ClassVar


class HeadwayError(Exception):
    """An error that the caller can act on: one clear line, no traceback."""

    grpc_code: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500


class InvalidInput(HeadwayError):
    """The request, the experiment file or the data is wrong."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class NotFound(HeadwayError):
    """What was asked for is not there."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class AlreadyExists(HeadwayError):
    """The name is taken by somebody else."""

    grpc_code = "ALREADY_EXISTS"
    http_status = 409


class StaleVersion(HeadwayError):
    """A newer policy version or a newer leader exists."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class Overloaded(HeadwayError):
    """A bounded queue is full; nothing was started."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429


class Unavailable(HeadwayError):
    """A dependency is down or not ready yet."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class TimedOut(HeadwayError):
    """A wait came to its end; the message names what was waited for."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Refused(HeadwayError):
    """This caller may not do this."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class Unauthenticated(HeadwayError):
    """This caller has not said who it is, or not in a way that is believed."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


BY_CODE: dict[str, type[HeadwayError]] = {
    kind.grpc_code: kind
    for kind in (
        InvalidInput,
        NotFound,
        AlreadyExists,
        StaleVersion,
        Overloaded,
        Unavailable,
        TimedOut,
        Refused,
        Unauthenticated,
    )
}
