"""Errors of the HTTP API as `application/problem+json` (RFC 9457), also those of the framework, and in the OpenAPI.

HeadwayError        its own status; `detail` is its message
404, 405, ...       of the framework
422                 a parameter or a body that is not as documented; `errors` says where
500                 a bug: nothing of it is told, its traceback is in the log
"""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from headway.errors import HeadwayError, Unauthenticated

MEDIA_TYPE = "application/problem+json"


class Fault(BaseModel):
    """One thing that is wrong with a request."""

    where: str = Field(description="The parameter, or the path within the body.", examples=["query.limit"])
    message: str = Field(examples=["Input should be less than or equal to 1000"])


class Problem(BaseModel):
    """What went wrong."""

    type: str = Field(default="about:blank", description="RFC 9457: the status says it all.")
    title: str = Field(description="The name of the status.", examples=["Not Found"])
    status: int = Field(description="The HTTP status.", examples=[404])
    detail: str = Field(description="What to change, or what to wait for.", examples=["no task 0/17 is known"])
    errors: list[Fault] = Field(default=[], description="Each fault of the request; only with 422.")


def problem(
    status: int, detail: str, errors: Iterable[Fault] = (), headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An answer that says what went wrong."""
    content = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=list(errors))
    return JSONResponse(content.model_dump(), status, headers, MEDIA_TYPE)


def install_problems(app: FastAPI) -> None:
    """Let every error of the application be a problem, and say so in its OpenAPI."""
    app.add_exception_handler(HeadwayError, _of_headway)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(Exception, _of_bug)


async def _of_headway(request: Request, error: Any) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else None
    return problem(error.http_status, str(error), headers=headers)


async def _of_framework(request: Request, error: Any) -> JSONResponse:
    return problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers)


async def _of_validation(request: Request, error: Any) -> JSONResponse:
    faults = [Fault(where=".".join(map(str, one["loc"])), message=one["msg"]) for one in error.errors()]
    return problem(422, "; ".join(f"{fault.where}: {fault.message}" for fault in faults), faults)


async def _of_bug(request: Request, error: Exception) -> JSONResponse:
    return problem(500, "a bug of the controller; its log has the traceback")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route says of its errors, beside those that its dependencies and parameters bring."""
    return {status: {"description": HTTPStatus(status).phrase} for status in statuses}
