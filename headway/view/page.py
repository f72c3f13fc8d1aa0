"""The page: files of this package, under a policy by which a browser runs no other script and asks no other host."""

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(str(files("headway.view") / "static"))
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """Static files with the headers of the page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def mount_page(app: FastAPI) -> None:
    """Serve `/` and `/static/`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def get_page() -> FileResponse:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.include_router(router)
    app.mount("/static", PageFiles(directory=FOLDER), name="static")
