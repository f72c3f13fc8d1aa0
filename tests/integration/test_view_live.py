"""The page of a run that goes on: it moves by the controller's own events, and shows its trajectories."""

from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import expect
from test_controller_app import World, submit, world
from view_browser import open_page

from headway.core.version import PolicyVersion
from headway.runtime.wire import version_to_wire
from headway.v1 import rollout_controller_pb2 as pb

STATS = {
    "ppo_actor/task_reward/avg": 0.25, "throughput/samples_per_s": 8.0, "rollout/samples": 8.0, "timing/step": 1.0,
    "timing/update": 0.6, "timing/wait_for_batch": 0.4, "rollout/staleness/max": 0.0, "total_steps": 2.0,
}  # fmt: skip


async def step(here: World, number: int) -> None:
    """Fetch a batch, publish the next version, commit."""
    request = pb.FetchBatchRequest(step=number, num_groups=4, fencing_token=1)
    async for _ in here.stub.FetchBatch(request, timeout=30):
        pass
    version = PolicyVersion(1, number + 1)
    await here.publish(version)
    stats = STATS | {"ppo_actor/task_reward/avg": 0.25 * (number + 1)}
    commit = pb.CommitRequest(step=number, fencing_token=1, version=version_to_wire(version), stats=stats)
    await here.stub.Commit(commit)


async def test_the_dashboard_moves_with_the_run_and_shows_its_samples(tmp_path: Path) -> None:
    async with world(tmp_path, "rollout.dump_to_file=true") as here, open_page() as page:
        await page.goto(f"http://{here.http}/")
        await expect(page.get_by_text("live · step 0")).to_be_visible()
        await expect(page.get_by_text("No new rollouts: no server serves a published version yet.")).to_be_visible()
        await here.publish(PolicyVersion(1, 0))
        await here.stub.Begin(pb.BeginRequest(fencing_token=1, step=0, is_fresh=True))
        await submit(here.stub, 12)
        await expect(page.get_by_text("No new rollouts: staleness: 8 groups")).to_be_visible()
        await step(here, 0)
        await expect(page.get_by_text("live · step 1 of 2")).to_be_visible()
        await expect(page.get_by_role("img", name="training: 0.250 at step 1")).to_be_visible()
        await expect(page.get_by_role("img", name="engine/0: ")).to_be_visible()
        await expect(page.get_by_role("row", name="0 failed v1.0 1 0")).to_be_visible()  # it takes no new weights
        await expect(page.get_by_role("row", name="v1.1 ").filter(has_text="0")).to_be_visible()
        await step(here, 1)
        await expect(page.get_by_role("img", name="training: 0.500 at step 2")).to_be_visible()
        await page.get_by_role("link", name="Trajectories").click()
        await expect(page.get_by_role("status").filter(has_text="8 groups")).to_be_visible()
        await page.get_by_role("link", name="0/3", exact=True).click()
        await expect(page.get_by_role("article")).to_have_count(2)
        await expect(page.get_by_text("The trainer has written nothing of this group.")).to_be_visible()
        await expect(page.get_by_role("radio", name="Advantage")).to_be_disabled()


async def test_a_lost_connection_shows_and_comes_back_by_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as here, open_page(expects=["ERR_FAILED", "ERR_INTERNET"]) as page:
        await page.goto(f"http://{here.http}/")
        await expect(page.get_by_text("live")).to_be_visible()
        await page.reload()
        await page.route("**/v1/events", lambda route: route.abort(), times=3)
        await page.reload()
        await expect(page.get_by_text("connection lost")).to_be_visible()
        await expect(page.get_by_text("live · step 0")).to_be_visible()


async def test_samples_that_are_not_written_are_told_with_the_key_to_set(tmp_path: Path) -> None:
    async with world(tmp_path) as here, open_page() as page:
        await page.goto(f"http://{here.http}/#/groups")
        await expect(page.get_by_text("Set rollout.dump_to_file: true")).to_be_visible()


async def test_beyond_this_machine_only_the_page_itself_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_API_TOKEN", "secret")
    monkeypatch.setenv("HEADWAY_API_PUBLISHED_ON", "0.0.0.0")
    async with world(tmp_path) as here:
        async with aiohttp.ClientSession(f"http://{here.http}") as http:
            for path, status in {
                "/": 200,
                "/static/app.js": 200,
                "/v1/groups": 401,
                "/v1/groups/0/1": 401,
                "/v1/trajectories/0/1/0": 401,
            }.items():
                async with http.get(path) as reply:
                    assert (path, reply.status) == (path, status)
        async with open_page(expects=["401"]) as page:
            await page.goto(f"http://{here.http}/")
            await page.get_by_role("dialog").get_by_label("Token", exact=True).fill("secret")
            await page.keyboard.press("Enter")
            await expect(page.get_by_text("live · step 0")).to_be_visible()
