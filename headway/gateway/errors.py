"""Errors of the gateway, beside those of `headway.errors`.

SessionEnded        410   the session is over; the message says why
BodyTooLarge        413   a request's body is larger than is read
Unsupported         400   a parameter that would have to change what is generated, and cannot
"""

from headway.errors import HeadwayError, InvalidInput


class SessionEnded(HeadwayError):
    """The session has ended: by its agent, by the workflow, or by its time limit."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 410


class BodyTooLarge(HeadwayError):
    """A request's body is larger than is read."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 413


class Unsupported(InvalidInput):
    """A parameter that would have to change what is generated, and cannot."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter
