"""The probe says what a service says of itself: serving, not serving, not there."""

import asyncio

import pytest
from fastapi import FastAPI, Request, Response

from headway.runtime.grpc_server import serve_grpc
from headway.runtime.http_server import serve_http
from headway.runtime.probe import main, probe


async def test_a_grpc_service_serves_until_it_says_otherwise() -> None:
    async with serve_grpc("127.0.0.1", 0, lambda server: None, ["headway.v1.Nothing"]) as server:
        address = f"127.0.0.1:{server.port}"
        assert await asyncio.to_thread(probe, address) == ""
        await server.set_serving(False)
        assert await asyncio.to_thread(probe, address) == "NOT_SERVING"


async def test_an_http_service_serves_when_it_answers_200() -> None:
    app = FastAPI()

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=503)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    async with serve_http(app, "127.0.0.1", 0) as port:
        assert await asyncio.to_thread(probe, f"http://127.0.0.1:{port}/health") == ""
        assert await asyncio.to_thread(probe, f"http://127.0.0.1:{port}/ready") == "HTTP 503"


async def test_an_http_service_is_asked_as_localhost_and_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.get("/status")
    async def status(request: Request) -> Response:
        asked = (request.url.hostname, request.headers.get("Authorization"))
        return Response(status_code=200 if asked == ("localhost", "Bearer abc") else 401)

    async with serve_http(app, "127.0.0.1", 0) as port:
        assert await asyncio.to_thread(probe, f"http://127.0.0.1:{port}/status") == "HTTP 401"
        monkeypatch.setenv("HEADWAY_API_TOKEN", "abc")
        assert await asyncio.to_thread(probe, f"http://127.0.0.1:{port}/status") == ""


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1/health"])
def test_nobody_there_is_one_line_and_exit_code_1(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"{target} does not serve: ")
