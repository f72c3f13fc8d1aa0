"""Decide who may read from the controller's HTTP API, and who may control the run.

    bound to          token set    reading              control
    loopback          no           open                 403: says how to set a token
    loopback          yes          open                 the token
    anything else     no           the service does not start
    anything else     yes          the token            the token

A container binds every address, and its port is published by somebody else: `HEADWAY_API_PUBLISHED_ON` says where, and
counts then as the address that is bound. Open reading answers only calls that name a loopback host, so that no web page
can read through a name of its own that leads here (DNS rebinding).

Outside of it all stand `/health`, which tells nothing, and `/metrics`, which tells numbers, no text of any sample.
The token travels as `Authorization: Bearer ...` and is compared in constant time.
"""

import ipaddress
import os
import secrets
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from headway.config.secrets import secret
from headway.errors import InvalidInput, Refused, Unauthenticated

TOKEN = "HEADWAY_API_TOKEN"
PUBLISHED_ON = "HEADWAY_API_PUBLISHED_ON"
HOW = f"set {TOKEN}, or {TOKEN}_FILE to a file that holds it"
CONTROL = HTTPBearer(scheme_name="token", description=f"The value of {TOKEN}.", auto_error=False)
READ = HTTPBearer(scheme_name="token, unless reading is open", auto_error=False)
"""The same token; `openapi.py` knows by the scheme what a call needs."""


@dataclass(frozen=True, slots=True)
class Access:
    """What callers need.

    Args:
        token: Empty: nobody can control.
        is_open: Reading needs no token.
    """

    token: str = ""
    is_open: bool = True

    @classmethod
    def of(cls, host: str) -> "Access":
        """The access to a server that binds `host`, from the environment.

        Raises:
            InvalidInput: It can be reached from elsewhere, and there is no token.
        """
        token = secret(None, TOKEN) or ""
        reached_at = os.environ.get(PUBLISHED_ON) or host
        if not token and not is_loopback(reached_at):
            raise InvalidInput(f"the HTTP API would be open to everyone who reaches {reached_at}: {HOW}")
        return cls(token, is_open=is_loopback(reached_at))

    def check_read(self, request: Request, token: str | None) -> None:
        """
        Raises:
            Unauthenticated: The token is missing or wrong.
            Refused: Reading is open, and the call came by a name that is not this machine's.
        """
        if not self.is_open:
            self.check_token(token)
        elif not is_loopback(request.url.hostname or ""):
            raise Refused("reading is open to calls that name a loopback host, such as 127.0.0.1 or localhost")

    def check_control(self, token: str | None) -> None:
        """
        Raises:
            Unauthenticated: The token is missing or wrong.
            Refused: No token is configured, so nobody can control.
        """
        if not self.token:
            raise Refused(f"control needs a token, and none is configured: {HOW}, and start again")
        self.check_token(token)

    def check_token(self, token: str | None) -> None:
        """
        Raises:
            Unauthenticated: The token is missing or wrong.
        """
        if token is None or not secrets.compare_digest(token.encode(), self.token.encode()):
            raise Unauthenticated(f"the token is {'missing' if token is None else 'wrong'}: it is the value of {TOKEN}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it.

    Example:
        >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "example.org")]
        [True, True, True, False, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def access_of(request: Request) -> Access:
    """The access that the application was made with."""
    return cast(Access, request.app.state.access)


async def require_read(request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(READ)]) -> None:
    """A dependency: the caller may read."""
    access_of(request).check_read(request, bearer.credentials if bearer else None)


async def require_control(
    request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(CONTROL)]
) -> None:
    """A dependency: the caller may control the run."""
    access_of(request).check_control(bearer.credentials if bearer else None)
