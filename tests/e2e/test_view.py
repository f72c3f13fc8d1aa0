"""`headway view` on the folder of a real run: what was consumed is there, token by token, within the bound."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_quickstart import headway_up

SMALL = ("total_train_steps=4", "warm_start.steps=20", "train_dataset.batch_size=4", "gconfig.n_samples=4",
         "rollout.max_concurrent_rollouts=8", "evaluator.freq_steps=null", "evaluator.max_rows=8")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_that_is_over_can_be_looked_at(tmp_path: Path) -> None:
    async with headway_up(tmp_path, *SMALL) as launch:
        assert await launch.end(280) == 0, launch.text
    (run,) = folders(tmp_path)
    assert "  dashboard: http://127.0.0.1:" in launch.text
    assert f"headway view {run}" in launch.text
    argv = ["-m", "headway", "view", str(run), "--port", "0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).split()[1].decode().rstrip("/")
        async with aiohttp.ClientSession(url, raise_for_status=True) as http:
            await look(http)
    finally:
        process.terminate()
        await process.wait()


def folders(root: Path) -> list[Path]:
    return list(root.glob("run/*/*/*"))


async def look(http: aiohttp.ClientSession) -> None:
    async def get(path: str) -> Any:
        async with http.get(path) as reply:
            return await reply.json()

    async with http.get("/") as reply:
        assert "<title>Headway</title>" in await reply.text()
    status = await get("/v1/status")
    assert (status["num_steps"], status["tasks"]["is_conserved"]) == (4, True)
    history = await get("/v1/metrics/history?name=ppo_actor/task_reward/avg")
    assert [step for step, _ in history["series"][0]["points"]] == [1, 2, 3, 4]
    page = await get("/v1/groups?kind=train&min_staleness=0&sort=staleness&limit=100")
    assert page["total"] == 4 * 4
    assert page["groups"][0]["staleness"] <= 2
    for group in page["groups"]:
        sample = await get(f"/v1/trajectories/{group['task_id']}/3?kind=train")
        assert "".join(sample["pieces"]) == sample["text"]
        trained = sample["trained"]
        made = [i for i, version in enumerate(sample["versions"]) if version >= 0]
        assert trained["step"] == group["consumed_step"]
        assert all(abs(trained["divergence"][i]) < 5 for i in made)
        assert len({trained["advantages"][i] for i in made}) == 1
