"""Who may read and who may control, by where the API is reached and whether there is a token; errors are problems."""

from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI

from headway.errors import InvalidInput, Overloaded
from services.rollout_controller.auth import Access, require_control, require_read
from services.rollout_controller.openapi import install_openapi
from services.rollout_controller.problems import install_problems

TOKEN = "a-token"
GOOD, WRONG = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer other"}
PUBLIC = Access(TOKEN, is_open=False)
LOOPBACK = Access(TOKEN, is_open=True)
NO_TOKEN = Access()


def app_with(access: Access) -> FastAPI:
    app, router = FastAPI(), APIRouter()
    app.state.access = access
    install_problems(app)
    install_openapi(app, access)

    @router.get("/read", dependencies=[Depends(require_read)])
    async def read(limit: int = 1) -> dict[str, int]:
        return {"limit": limit}

    @router.post("/control", dependencies=[Depends(require_control)])
    async def control() -> dict[str, int]:
        return {}

    @router.get("/fails")
    async def fails(is_bug: bool = False) -> None:
        if is_bug:
            raise RuntimeError("secret detail")
        raise Overloaded("the queue is full")

    app.include_router(router)
    return app


async def called(access: Access, method: str, path: str, headers: dict[str, str], host: str = "127.0.0.1") -> int:
    async with client(access, host) as http:
        return (await http.request(method, path, headers=headers)).status_code


def client(access: Access, host: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_with(access), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8470")


@pytest.mark.parametrize(
    ("access", "headers", "read", "control"),
    [
        (NO_TOKEN, {}, 200, 403),
        (NO_TOKEN, {"Authorization": "Bearer "}, 200, 403),
        (LOOPBACK, {}, 200, 401),
        (LOOPBACK, WRONG, 200, 401),
        (LOOPBACK, GOOD, 200, 200),
        (PUBLIC, {}, 401, 401),
        (PUBLIC, WRONG, 401, 401),
        (PUBLIC, {"Authorization": f"Basic {TOKEN}"}, 401, 401),
        (PUBLIC, {"Authorization": "Bearer tökén".encode("latin-1").decode("latin-1")}, 401, 401),
        (PUBLIC, GOOD, 200, 200),
    ],
)
async def test_reading_is_open_on_loopback_only_and_control_always_needs_the_token(
    access: Access, headers: dict[str, str], read: int, control: int
) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    assert await called(access, "GET", "/read", raw) == read  # type: ignore[arg-type]
    assert await called(access, "POST", "/control", raw) == control  # type: ignore[arg-type]


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("[::1]", 200), ("rebound.example.org", 403)])
async def test_open_reading_answers_only_calls_that_name_this_machine(host: str, status: int) -> None:
    assert await called(LOOPBACK, "GET", "/read", {}, host) == status
    assert await called(PUBLIC, "GET", "/read", GOOD, host) == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.3", "::", "controller.example.org"])
def test_without_a_token_the_api_is_not_served_beyond_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_API_TOKEN", raising=False)
    with pytest.raises(InvalidInput, match="HEADWAY_API_TOKEN, or HEADWAY_API_TOKEN_FILE"):
        Access.of(host)
    monkeypatch.setenv("HEADWAY_API_TOKEN", TOKEN)
    assert Access.of(host) == PUBLIC


def test_a_port_published_on_loopback_alone_counts_as_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_PUBLISHED_ON", "127.0.0.1")
    assert Access.of("0.0.0.0") == NO_TOKEN
    monkeypatch.setenv("HEADWAY_API_PUBLISHED_ON", "0.0.0.0")
    with pytest.raises(InvalidInput, match=r"reaches 0\.0\.0\.0"):
        Access.of("0.0.0.0")


def test_the_token_may_stand_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("HEADWAY_API_TOKEN_FILE", str(tmp_path / "token"))
    assert Access.of("127.0.0.1") == LOOPBACK
    (tmp_path / "token").write_text("")
    with pytest.raises(InvalidInput, match="HEADWAY_API_TOKEN"):
        Access.of("0.0.0.0")


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [
        ("GET", "/nothing", 404, "GET /nothing: Not Found"),
        ("PUT", "/read", 405, "PUT /read: Method Not Allowed"),
        ("GET", "/read?limit=x", 422, "query.limit: Input should be a valid integer"),
        ("GET", "/fails", 429, "the queue is full"),
        ("GET", "/fails?is_bug=1", 500, "a bug of the controller; its log has the traceback"),
    ],
)
async def test_every_error_is_a_problem(method: str, path: str, status: int, detail: str) -> None:
    async with client(LOOPBACK) as http:
        reply = await http.request(method, path)
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/problem+json"
    body = reply.json()
    assert (body["status"], body["type"]) == (status, "about:blank")
    assert body["detail"].startswith(detail)
    assert [fault["where"] for fault in body["errors"]] == (["query.limit"] if status == 422 else [])
    assert ("allow" in reply.headers) == (status == 405)


async def test_the_openapi_says_what_needs_the_token_and_that_errors_are_problems() -> None:
    for access, security in ((LOOPBACK, []), (PUBLIC, [{"token": []}])):
        async with client(access) as http:
            document = (await http.get("/openapi.json")).json()
        read, control = document["paths"]["/read"]["get"], document["paths"]["/control"]["post"]
        assert read["security"] == security
        assert control["security"] == [{"token": []}]
        assert set(control["responses"]) == {"200", "401", "403"}
        assert list(read["responses"]["422"]["content"]) == ["application/problem+json"]
