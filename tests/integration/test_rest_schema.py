"""The REST API keeps to its own OpenAPI: Schemathesis calls every operation, with the token, and finds nothing.

The stream of events has no end, and is not called here: see test_live_answers.py. The routes of the viewer and of the
gateway have tests of their own.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import SkipTest

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from test_controller_app import submit, until, world

from headway.core.version import PolicyVersion

TOKEN = "a-token"
OURS = (
    "/v1/status", "/v1/report", "/v1/services", "/v1/servers", "/v1/waits", "/v1/versions", "/v1/versions/{version}",
    "/v1/tasks", "/v1/tasks/{task_id}", "/v1/metrics/history", "/v1/timeline", "/v1/evaluations", "/v1/settings",
    "/v1/pause", "/v1/resume", "/v1/trainer", "/v1/servers/{name}/drain", "/v1/servers/{name}/undrain",
    "/v1/checkpoints", "/v1/stop", "/health", "/metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A controller with tasks and a version, in a thread with a loop of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_API_TOKEN", TOKEN)
        ready: Future[tuple[str, Callable[[], None]]] = Future()
        folder = tmp_path_factory.mktemp("rest")
        thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, ready)))
        thread.start()
        address, stop = ready.result(60)
        yield address
        stop()
        thread.join()


async def _serve(folder: Path, ready: "Future[tuple[str, Callable[[], None]]]") -> None:
    try:
        async with world(folder) as here:
            await here.publish(PolicyVersion(1, 0))
            await submit(here.stub, 12)
            await until(here, lambda status: status["tasks"]["ready"] == 8)
            loop, stopped = asyncio.get_running_loop(), asyncio.Event()
            ready.set_result((f"http://{here.http}", lambda: loop.call_soon_threadsafe(stopped.set) and None))
            await stopped.wait()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise


@pytest.fixture(scope="module")
def contract(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("path", OURS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_operation_keeps_to_the_document(path: str, mode: GenerationMode, contract: Any) -> None:
    for operation in contract[path].values():
        check(operation, mode)


def check(operation: Any, mode: GenerationMode) -> None:
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def keeps_to_the_document(case: Any) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})

    try:
        keeps_to_the_document()
    except (Unsatisfiable, SkipTest):
        assert mode is GenerationMode.NEGATIVE, "there is nothing that can be wrong with such a call"


async def test_what_is_not_in_the_document_is_a_problem_too(tmp_path: Path) -> None:
    async with world(tmp_path) as here, aiohttp.ClientSession() as http:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("PUT", "/v1/pause", 405),
            ("GET", "/v1/tasks/x", 404),
        ):
            async with http.request(method, f"http://{here.http}{path}") as reply:
                assert (reply.status, reply.content_type) == (status, "application/problem+json")
