"""People change a run while it goes on: what they ask for acts at once, is seen, and outlives the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_controller_app import World, submit, until, world

from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.runtime.service import Placement
from headway.v1 import rollout_controller_pb2 as pb
from services.rollout_controller import app as rollout_controller

TOKEN = "a-token"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_TOKEN", TOKEN)


@asynccontextmanager
async def published(folder: Path) -> AsyncIterator[World]:
    async with world(folder) as here:
        await here.publish(PolicyVersion(1, 0))
        await until(here, lambda status: [one["state"] for one in status["servers"]] == ["serving"])
        yield here


async def call(here: World, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{here.http}{path}", json=body, headers=headers) as reply,
    ):
        return reply.status, await reply.json(content_type=None)


CONTROL = [
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("PATCH", "/v1/settings"),
    ("POST", "/v1/servers/0/drain"),
    ("POST", "/v1/servers/0/undrain"),
    ("POST", "/v1/checkpoints"),
    ("POST", "/v1/evaluations"),
    ("POST", "/v1/stop"),
]


async def test_nothing_is_changed_without_the_token(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for method, path in CONTROL:
            for wrong in (None, "other"):
                status, problem = await call(here, method, path, {"max_head_offpolicyness": 3}, wrong)
                assert (status, problem["title"]) == (401, "Unauthorized"), path
        assert (await here.get("/v1/settings"))["max_head_offpolicyness"] == 1


async def test_the_service_is_not_served_beyond_loopback_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as here:
        monkeypatch.delenv("HEADWAY_API_TOKEN")
        with pytest.raises(InvalidInput, match="set HEADWAY_API_TOKEN"):
            async with rollout_controller.run(here.config, Placement(host="0.0.0.0")):
                pass


async def test_a_paused_run_starts_nothing_says_so_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    async with published(tmp_path) as here:
        assert (await call(here, "POST", "/v1/pause", {"reason": "a new reward"}))[1]["is_paused"]
        await submit(here.stub, 4)
        status = await here.get("/v1/status")
        assert status["tasks"]["pending"] == 4
        assert status["staleness"]["holds_back"] == "new starts are paused"
        assert "new rollouts to be resumed: a new reward" in [wait["what"] for wait in status["waits"]]
        assert not (await call(here, "POST", "/v1/resume"))[1]["is_paused"]
        await until(here, lambda status: status["tasks"]["ready"] == 4)
        waits = (await here.get("/v1/status"))["waits"]
        assert not any("resumed" in wait["what"] for wait in waits)


async def test_another_bound_acts_at_once_and_reaches_the_trainer(tmp_path: Path) -> None:
    async with published(tmp_path) as here:
        assert (await submit(here.stub, 16)).max_head_offpolicyness == 1
        await until(here, lambda status: status["tasks"]["ready"] == 8)
        status, settings = await call(here, "PATCH", "/v1/settings", {"max_head_offpolicyness": 2})
        assert (status, settings["max_head_offpolicyness"], settings["file"]) == (200, 2, {"max_head_offpolicyness": 1})
        await until(here, lambda status: status["tasks"]["ready"] == 12)
        assert (await submit(here.stub, 0)).max_head_offpolicyness == 2
        await here.stub.Begin(pb.BeginRequest(fencing_token=1, step=0))
        assert await bound_of(here, 0) == 2
        await call(here, "PATCH", "/v1/settings", {"max_head_offpolicyness": 1})
        assert await bound_of(here, 1) == 1
        assert await bound_of(here, 0) == 2, "a batch that is handed out again keeps its bound"


async def bound_of(here: World, step: int) -> int:
    """The bound of a step's batch."""
    request = pb.FetchBatchRequest(step=step, num_groups=4, fencing_token=1)
    parts = [part async for part in here.stub.FetchBatch(request, timeout=30)]
    return parts[0].header.max_head_offpolicyness


async def test_what_was_changed_outlives_the_controller_unless_the_file_says_something_else(tmp_path: Path) -> None:
    async with published(tmp_path) as here:
        await call(here, "PATCH", "/v1/settings", {"max_head_offpolicyness": 3, "max_concurrent_rollouts": 5})
        await call(here, "POST", "/v1/pause", {"reason": "night"})
        weights = here.config.paths.weights
    weights.rename(tmp_path / "gone")
    async with world(tmp_path) as here:
        settings = await here.get("/v1/settings")
        assert (settings["max_head_offpolicyness"], settings["max_concurrent_rollouts"]) == (3, 5)
        assert (await here.get("/v1/pause"))["reason"] == "night"
    async with world(tmp_path, "rollout.max_head_offpolicyness=4") as here:
        settings = await here.get("/v1/settings")
        assert (settings["max_head_offpolicyness"], settings["max_concurrent_rollouts"]) == (4, 5)
        await here.stub.Begin(pb.BeginRequest(fencing_token=9, step=0, is_fresh=True))
        assert (await here.get("/v1/settings"))["max_concurrent_rollouts"] == 16
        assert not (await here.get("/v1/pause"))["is_paused"]


async def test_a_drained_engine_gets_no_requests_until_it_is_taken_back(tmp_path: Path) -> None:
    async with published(tmp_path) as here:
        status, servers = await call(here, "POST", "/v1/servers/0/drain")
        assert (status, servers[0]["state"]) == (200, "drained")
        await submit(here.stub, 4)
        await until(here, lambda status: status["requests_waiting"] == 8)
        assert (await here.get("/v1/status"))["servers"][0]["num_requests"] == 0
        await call(here, "POST", "/v1/servers/0/undrain")
        await until(here, lambda status: status["tasks"]["ready"] == 4)
        status, problem = await call(here, "POST", "/v1/servers/7/drain")
        assert (status, problem["detail"]) == (404, "no server 7 is registered; there are 0")


async def test_without_a_trainer_what_it_should_do_is_unavailable(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for path in ("/v1/checkpoints", "/v1/evaluations", "/v1/stop"):
            status, problem = await call(here, "POST", path)
            assert status == 404
            assert "no trainer leads" in problem["detail"]
        assert (await call(here, "GET", "/v1/trainer"))[0] == 404
