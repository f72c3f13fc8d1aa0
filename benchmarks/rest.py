"""How long `GET /v1/status` takes while 256 rollouts run: `python benchmarks/rest.py [SECONDS]`.

A real controller among real services, with a scripted engine that keeps 256 requests open; one client asks as fast as
it is answered. Printed are the percentiles in ms, and the load of the machine. Wanted: below 20 ms.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/integration")]

from test_controller_app import submit, until, world  # noqa: E402

from headway.core.version import PolicyVersion  # noqa: E402

NUM_ROLLOUTS = 256


async def measure(seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    settings = (
        f"rollout.max_concurrent_rollouts={NUM_ROLLOUTS}",
        f"rollout.consumer_batch_size={NUM_ROLLOUTS}",
        f"train_dataset.batch_size={NUM_ROLLOUTS}",
        "gconfig.n_samples=1",
        "gconfig.max_new_tokens=512",
    )
    with tempfile.TemporaryDirectory() as folder:
        async with world(Path(folder), *settings, tokens_per_s=None) as here, aiohttp.ClientSession() as http:
            await here.publish(PolicyVersion(1, 0))
            await submit(here.stub, NUM_ROLLOUTS)
            await until(here, lambda status: status["tasks"]["running"] == NUM_ROLLOUTS)
            return await ask(http, f"http://{here.http}/v1/status", seconds)


async def ask(http: aiohttp.ClientSession, url: str, seconds: float) -> list[float]:
    """Ask for so long."""
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        async with http.get(url) as reply:
            status: dict[str, Any] = await reply.json()
        took.append((time.perf_counter() - began) * 1000)
        assert status["tasks"]["running"] == NUM_ROLLOUTS
    return took


def main() -> None:
    took = sorted(asyncio.run(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)))
    found = {f"p{part}_ms": round(took[len(took) * part // 100], 2) for part in (50, 90, 99)}
    print(json.dumps({"answers": len(took), **found, "max_ms": round(took[-1], 2), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
