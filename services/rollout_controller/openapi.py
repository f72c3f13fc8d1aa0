"""The OpenAPI document of the controller: errors are problems, and each call says whether it needs the token."""

from typing import Any

from fastapi import FastAPI

from services.rollout_controller.auth import CONTROL, READ, Access
from services.rollout_controller.problems import MEDIA_TYPE, Problem

PROBLEM = {"$ref": "#/components/schemas/Problem"}
NEEDS_TOKEN: list[dict[str, list[str]]] = [{CONTROL.scheme_name: []}]


def install_openapi(app: FastAPI, access: Access) -> None:
    """Finish the document that FastAPI makes, once, when it is first asked for; all routes are known by then."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _finish(make(), access)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _finish(document: dict[str, Any], access: Access) -> None:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs") | {"Problem": schema}
    schemes = components.setdefault("securitySchemes", {})
    schemes.pop(READ.scheme_name, None)
    schemes[CONTROL.scheme_name] = {"type": "http", "scheme": "bearer", "description": CONTROL.model.description}
    for operations in document["paths"].values():
        for operation in operations.values():
            _finish_operation(operation, access)


def _finish_operation(operation: dict[str, Any], access: Access) -> None:
    answers, needs = operation["responses"], operation.get("security", [])
    if {READ.scheme_name: []} in needs:
        operation["security"] = [] if access.is_open else NEEDS_TOKEN
        answers |= _answer(403, "The call names no loopback host") if access.is_open else MISSING
    elif NEEDS_TOKEN[0] in needs:
        answers |= MISSING | _answer(403, "No token is configured")
    if "requestBody" in operation:
        answers |= _answer(400, "The body cannot be read") | answers
    for status, answer in answers.items():
        if status >= "400":
            answer["content"] = {MEDIA_TYPE: {"schema": PROBLEM}}


def _answer(status: int, description: str) -> dict[str, Any]:
    return {str(status): {"description": description}}


MISSING = _answer(401, "The token is missing or wrong")
