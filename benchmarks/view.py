"""How long a big run takes to open: `headway view` on a folder of 2,000 steps and 1 M trajectories.

    python -m benchmarks.view FOLDER [--steps 2000] [--groups 125] [--samples 4]

FOLDER is scratch space: a run is made there once (about 1.3 GB), with the index written step by step as the controller
does. Printed: what the index costs a step; the server's answers; from the start of navigation to the first render of
the dashboard and of the list of trajectories in headless Chromium; how long the index takes to be made anew.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from headway.view.folder import INDEX, SAMPLES, TRAINED, RunFolder
from headway.view.index import Index

REPEATS = 7
ANSWERS = {
    "status": "/v1/status",
    "history of nine metrics": "/v1/metrics/history?name=" + "&name=".join(
        ("ppo_actor/task_reward/avg", "eval/task_reward/avg", "throughput/samples_per_s", "throughput/tokens_per_s",
         "rollout/samples", "timing/step", "timing/wait_for_batch", "rollout/staleness/avg", "rollout/staleness/max")
    ),
    "groups, newest": "/v1/groups",
    "groups, best of the stale": "/v1/groups?sort=reward&min_staleness=2",
    "groups, longest": "/v1/groups?sort=length",
    "groups with a text": "/v1/groups?search=prompt+77",
    "a task": "/v1/groups/0/1000",
    "a trajectory": "/v1/trajectories/0/1000/1",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=125)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    run = args.folder / f"run/bench/view/{args.steps}x{args.groups}x{args.samples}"
    if not run.exists():
        make_run(run, args.steps, args.groups, args.samples)
    folder = RunFolder.at(run)
    with serving(run) as url:
        asyncio.run(measure_answers(url))
        measure_browser(url)
    shutil.copy(folder.rollouts / INDEX, folder.rollouts / f"{INDEX}.kept")
    measure_build(folder)
    os.replace(folder.rollouts / f"{INDEX}.kept", folder.rollouts / INDEX)


def make_run(run: Path, steps: int, groups: int, samples: int) -> None:
    """Write the files that a run leaves."""
    for kind in ("run", "logs", "rollout"):
        (run.parents[3] / kind / Path(*run.parts[-3:])).mkdir(parents=True)
    folder = RunFolder.at(run)
    (folder.logs / "stats.jsonl").write_bytes(b"".join(orjson.dumps(stats(step)) + b"\n" for step in range(steps + 1)))
    index, seconds = Index(folder.rollouts / INDEX, folder.dumps), []
    for step in range(steps):
        path = folder.rollouts / str(step) / SAMPLES
        path.parent.mkdir()
        tasks = [f"0/{step * groups + group}" for group in range(groups)]
        path.write_bytes(b"".join(sample_line(task, n, step) for task in tasks for n in range(samples)))
        trained = b"".join(trained_line(task, n, step) for task in tasks for n in range(samples))
        (path.parent / TRAINED).write_bytes(trained)
        began = time.process_time()
        index.catch_up_with([path])
        seconds.append(time.process_time() - began)
    first, last = statistics.mean(seconds[: steps // 10]), statistics.mean(seconds[-steps // 10 :])
    print(
        f"index as it is written: {statistics.mean(seconds) * 1e3:.1f} ms of CPU a step of {groups * samples} samples; "
        f"first tenth {first * 1e3:.1f}, last {last * 1e3:.1f}"
    )


def stats(step: int) -> dict[str, Any]:
    """As many numbers as a trainer writes."""
    wave = (step * 37 % 101) / 1000
    names = {f"ppo_actor/update/number_{i}/avg": wave * i for i in range(140)}
    return {
        "step": step, "version": f"v1.{step}", "time": 1.7e9 + step, **names, "total_steps": 2000.0,
        "ppo_actor/task_reward/avg": 0.2 + 0.7 * step / 2000 + wave, "throughput/samples_per_s": 500 + 1000 * wave,
        "throughput/tokens_per_s": 9000.0, "rollout/samples": 500.0, "rollout/groups": 125.0, "timing/step": 1 + wave,
        "timing/wait_for_batch": wave, "timing/update": 0.8, "rollout/staleness/avg": 1.5, "rollout/staleness/max": 2.0,
        **{f"ppo_actor/staleness_tokens/{age}": 1000.0 * age for age in range(3)},
        **({"eval/task_reward/avg": 0.2 + 0.6 * step / 2000} if step % 50 == 0 else {}),
    }  # fmt: skip


def sample_line(task: str, sample: int, step: int) -> bytes:
    number = zlib.crc32(f"{task} {sample}".encode())
    length = 8 + number % 16
    oldest = max(0, step - number % 3)
    return orjson.dumps({
        "task_id": task, "sample": sample, "attempt": 1, "outcome": "accepted", "reward": number % 5 / 4,
        "stop_reason": "stop", "version_min": oldest, "version_max": step, "seqlen": 12 + length, "prompt_len": 12,
        "num_loss_tokens": length, "prompt": f"prompt {task[2:]} of many", "completion": "1234567890" * (length // 8),
        "metrics": {}, "token_ids": list(range(12 + length)), "logprobs": [0.0] * 12 + [-0.0625] * length,
        "versions": [-1] * 12 + [step] * length, "loss_mask": [0] * 12 + [1] * length,
    }, option=orjson.OPT_APPEND_NEWLINE)  # fmt: skip


def trained_line(task: str, sample: int, step: int) -> bytes:
    length = 8 + zlib.crc32(f"{task} {sample}".encode()) % 16
    return orjson.dumps({
        "step": step, "task_id": task, "sample": sample, "reward": 0.5, "start": 12, "loss_mask": [1] * length,
        "advantages": [0.5] * length, "prox_logp": [-0.0625] * length, "logp": [-0.0625] * length,
    }, option=orjson.OPT_APPEND_NEWLINE)  # fmt: skip


@contextmanager
def serving(run: Path) -> Iterator[str]:
    """`headway view`, and how long it takes to answer."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "view", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[1].rstrip("/")
    print(f"headway view: serves after {time.monotonic() - began:.2f} s")
    try:
        yield url
    finally:
        process.terminate()
        process.wait()


async def measure_answers(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for name, path in ANSWERS.items():
            seconds, size = [], 0
            for _ in range(REPEATS):
                began = time.monotonic()
                async with http.get(f"{url}{path}") as reply:
                    assert reply.status == 200, await reply.text()
                    size = len(await reply.read())
                seconds.append(time.monotonic() - began)
            median_ms, most_ms = statistics.median(seconds) * 1e3, max(seconds) * 1e3
            print(f"{name}: {median_ms:.1f} ms, at most {most_ms:.1f}, {size / 1e3:.1f} kB")


def measure_browser(url: str) -> None:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium")
    if executable is None:
        print("no chromium on PATH: nothing measured in a browser")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])

        def opened(path: str, what: str) -> Callable[[], float]:
            def open_once() -> float:
                page = browser.new_context().new_page()
                began = time.monotonic()
                page.goto(f"{url}{path}")
                page.wait_for_selector(what)
                page.evaluate("new Promise(requestAnimationFrame)")
                found = time.monotonic() - began
                page.context.close()
                return found

            return open_once

        for name, open_once in {
            "dashboard": opened("/", "section[aria-label=Reward] path.curve"),
            "list of trajectories": opened("/#/groups", ".groups tbody tr"),
        }.items():
            seconds = [open_once() for _ in range(REPEATS)]
            print(f"{name}: first render after {statistics.median(seconds):.2f} s, at most {max(seconds):.2f}")
        browser.close()


def measure_build(folder: RunFolder) -> None:
    for path in folder.rollouts.glob(f"{INDEX}*"):
        if not path.name.endswith(".kept"):
            path.unlink()
    began, cpu = time.monotonic(), time.process_time()
    index = Index(folder.rollouts / INDEX, folder.dumps)
    size = index.unread_bytes()
    index.catch_up()
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    print(f"index of a folder without one: {wall_s:.0f} s ({cpu_s:.0f} s of CPU), {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
