"""What people watch, as programs see it: the stream of the status, numbers over the steps by pages, the timeline."""

import json
from pathlib import Path

import aiohttp
from test_controller_app import submit, until, world
from test_view_live import step

from headway.core.version import PolicyVersion
from headway.v1 import rollout_controller_pb2 as pb
from services.rollout_controller.live import history_of

REWARD = "ppo_actor/task_reward/avg"


async def test_numbers_timeline_and_evaluations_are_answered_as_the_run_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.publish(PolicyVersion(1, 0))
        await here.stub.Begin(pb.BeginRequest(fencing_token=1, step=0, is_fresh=True))
        await submit(here.stub, 12)
        await until(here, lambda status: status["tasks"]["ready"] == 8)
        for number in range(2):
            await step(here, number)
        history = await here.get(f"/v1/metrics/history?name={REWARD}&name=none")
        assert history["series"] == [{"name": REWARD, "points": [[1, 0.25], [2, 0.5]]}]
        assert "timing/update" in history["names"]
        page = await here.get(f"/v1/metrics/history?name={REWARD}&since_step=1&limit=1")
        assert (page["series"][0]["points"], page["next_step"]) == ([[1, 0.25]], 2)
        page = await here.get(f"/v1/metrics/history?name={REWARD}&since_step=2&limit=1")
        assert (page["series"][0]["points"], page["next_step"]) == ([[2, 0.5]], None)
        timeline = await here.get("/v1/timeline")
        assert {"engine/0", "controller"} <= {lane["name"] for lane in timeline["lanes"]}
        later = await here.get(f"/v1/timeline?since={timeline['now'] + 60}")
        assert all(span["end"] is None for lane in later["lanes"] for span in lane["spans"])
        assert [one["version"] for one in (await here.get("/v1/versions"))["versions"]] == ["v1.2", "v1.1", "v1.0"]
        assert (await here.get("/v1/versions?limit=1"))["next"] == "v1.2"
        assert (await here.get("/v1/versions/v1.0"))["served_by"] == ["0"]
        page = await here.get("/v1/tasks?state=consumed&limit=5")
        assert [task["task_id"] for task in page["tasks"]] == ["0/0", "0/1", "0/2", "0/3", "0/4"]
        assert (await here.get(f"/v1/tasks?state=consumed&cursor={page['next']}"))["tasks"][0]["task_id"] == "0/5"
        assert (await here.get("/v1/tasks/0/3"))["state"] == "consumed"
        assert [server["name"] for server in await here.get("/v1/servers")] == ["0"]
        assert len(await here.get("/v1/services")) == 3
        assert isinstance(await here.get("/v1/waits"), list)
        assert await here.get("/v1/evaluations") == {"running": [], "ended": []}


async def test_the_stream_begins_with_the_status_and_ends_with_the_service(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with world(tmp_path) as here:
            stream = await http.get(f"http://{here.http}/v1/events")
            assert stream.content_type == "text/event-stream"
            lines = [(await stream.content.readline()).decode().strip() for _ in range(4)]
            assert lines[1] == "event: status"
            assert json.loads(lines[2].removeprefix("data: "))["run"] == "test/controller"
            await here.publish(PolicyVersion(1, 0))
            async for line in stream.content:
                if b'"published_version":"v1.0"' in line:
                    break
        assert (await stream.content.read()).endswith(b"event: end\ndata: {}\n\n")


def test_pages_of_the_history_hold_each_step_once() -> None:
    steps = [(step, {"x": float(step)} if step % 2 else {}) for step in range(7)]
    found, since = [], 0
    while True:
        page = history_of([one for one in steps if one[0] >= max(0, since - 1)][:4], ["x"], 3)
        found += [point for series in page.series for point in series.points]
        if page.next_step is None:
            break
        since = page.next_step
    assert found == [(2, 1.0), (4, 3.0), (6, 5.0)]
