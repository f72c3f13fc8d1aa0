"""What a request costs the rollout controller: CPU time per sample with 256 requests in flight, on scripted servers.

    python -m benchmarks.generation [--seconds 5] [--rounds 3] [--areal PYTHON]

`headway`   the fleet's engine as workflows use it: routing, batching, streams, evidence, versions
`workflow`  the same with RLVRWorkflow around it, a group of 16 for each prompt: encode, decode, reward, trajectory
`bare`      aiohttp and orjson alone: one POST a sample, answered whole, nothing checked
`areal`     AReaL's RemoteInfEngine.agenerate with its SGLang backend; PYTHON is that of an environment with areal 1.0.4

The servers are two processes of `headway.testing.scripted_engine`, which answer at once, and stream what is new, as the
inference agent has SGLang do. Each peer is a process of its own, whose CPU time is counted, user and system. Rounds
take turns; the median is shown.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

from headway.core.routing import RoutingPolicy
from headway.core.version import PolicyVersion
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.testing.scripted_model import VOCABULARY
from headway.workflow import GenerationHyperparameters, ModelRequest, RLVRWorkflow, run_group
from services.rollout_controller.fleet import Fleet, FleetOptions

IN_FLIGHT = 256
GROUP = 16
PROMPT = list(range(10, 110))
LENGTHS = (16, 512)
TOKENIZER = Path(__file__).parents[1] / "configs/models/sort_digits"
Once = Callable[[int], Awaitable[int]]
"""One unit of work with a number; returns how many samples it made."""

AREAL = """
import asyncio, resource, sys, time
from types import SimpleNamespace
import uvloop
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api import ModelRequest
from areal.engine.sglang_remote import SGLangBackend
from areal.infra.remote_inf_engine import RemoteInfEngine

async def main(length, seconds, in_flight, urls):
    engine = RemoteInfEngine(InferenceEngineConfig(), SGLangBackend())
    engine.addresses = [url.removeprefix("http://") for url in urls]
    engine._workflow_executor = SimpleNamespace(is_paused=lambda: False)
    gconfig = GenerationHyperparameters(max_new_tokens=length)
    done, until = 0, 0.0
    async def client(number):
        nonlocal done
        while time.monotonic() < until:
            number += in_flight
            req = ModelRequest(rid=str(number), input_ids=[number % 500, *range(10, 110)], gconfig=gconfig)
            response = await engine.agenerate(req)
            assert len(response.output_tokens) == length
            done += 1
    for warm in (1.0, seconds):
        done, until = 0, time.monotonic() + warm
        cpu = time.process_time()
        await asyncio.gather(*(client(number) for number in range(in_flight)))
    print(done, time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
"""


@contextmanager
def servers(count: int = 2) -> Iterator[list[str]]:
    """Scripted servers that answer at once; their addresses."""
    words = [sys.executable, "-m", "headway.testing.scripted_engine", "--tokens-per-s", "inf", "--label", "v1.0"]
    words.append("--incremental")
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def publish(root: Path) -> None:
    folder = root / "v1.0"
    folder.mkdir()
    (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": VOCABULARY}))
    (folder / "manifest.json").write_text("{}")


async def headway(length: int, seconds: float, urls: list[str], with_workflow: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        publish(Path(folder))
        options = FleetOptions(Path(folder), policy=RoutingPolicy.PREFIX_AFFINITY)
        async with Supervisor() as supervisor, Fleet(options, supervisor, Waits()) as fleet:
            await fleet.move_to(PolicyVersion(1, 0))
            for number, url in enumerate(urls):
                fleet.add(str(number), url)
            await fleet.wait_for_step(0)
            once = workflow_of(fleet, length) if with_workflow else request_of(fleet, length)
            await measure(once, IN_FLIGHT // GROUP if with_workflow else IN_FLIGHT, seconds)


def request_of(fleet: Fleet, length: int) -> Once:
    engine, gconfig = fleet.engine(), GenerationHyperparameters(max_new_tokens=length)

    async def once(number: int) -> int:
        response = await engine.agenerate(ModelRequest(input_ids=[number % 500, *PROMPT], gconfig=gconfig))
        assert response.output_len == length
        return 1

    return once


def workflow_of(fleet: Fleet, length: int) -> Once:
    from transformers import AutoTokenizer

    async def reward(prompt: str, completion: str, prompt_ids: object, completion_ids: object, /, **data: str) -> float:
        return float(completion == data["answer"])

    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    workflow = RLVRWorkflow(reward, GenerationHyperparameters(max_new_tokens=length), tokenizer)
    engine = fleet.engine()

    async def once(number: int) -> int:
        group = await run_group(workflow, engine, {"prompt": f"sort {number:08d}={PADDING}", "answer": ""}, GROUP)
        assert group is not None
        return len(group)

    return once


PADDING = "0123456789" * 9
"""Makes prompts of about 100 tokens."""


async def bare(length: int, seconds: float, urls: list[str]) -> None:
    turns = itertools.cycle(urls)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def once(number: int) -> int:
            body = {
                "input_ids": [number % 500, *PROMPT],
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": length},
            }
            async with session.post(f"{next(turns)}/generate", data=orjson.dumps(body)) as reply:
                meta = orjson.loads(await reply.read())["meta_info"]
            assert meta["completion_tokens"] == length
            return 1

        await measure(once, IN_FLIGHT, seconds)


async def measure(once: Once, in_flight: int, seconds: float) -> None:
    """Warm up, then print samples made and CPU seconds used, with so many units in flight."""
    done, until = 0, 0.0

    async def client(number: int) -> None:
        nonlocal done
        while time.monotonic() < until:
            number += in_flight
            made = await once(number)
            done += made

    cpu = 0.0
    for duration in (1.0, seconds):
        done, until, cpu = 0, time.monotonic() + duration, time.process_time()
        await asyncio.gather(*(client(number) for number in range(in_flight)))
    print(done, time.process_time() - cpu)


def run_peer(name: str, length: int, seconds: float, urls: list[str], areal: str) -> tuple[float, float]:
    """Milliseconds of CPU a sample, and samples a second."""
    if name == "areal":
        words = [areal, "-c", AREAL, str(length), str(seconds), str(IN_FLIGHT), *urls]
    else:
        words = [sys.executable, "-m", "benchmarks.generation", "--peer", name, str(length), str(seconds), *urls]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout
    done, cpu_s = map(float, output.splitlines()[-1].split()[:2])
    return cpu_s / done * 1e3, done / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--areal", default="", help="Python of an environment with areal 1.0.4")
    parser.add_argument("--peer", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        name, length, seconds, *urls = arguments.peer
        if name == "bare":
            uvloop.run(bare(int(length), float(seconds), urls))
        else:
            uvloop.run(headway(int(length), float(seconds), urls, name == "workflow"))
        return
    names = ["headway", "workflow", "bare", *(["areal"] if arguments.areal else [])]
    for length in LENGTHS:
        show(length, names, arguments)


def show(length: int, names: list[str], arguments: argparse.Namespace) -> None:
    """Measure all peers in turns at one length, and print a line for each."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            with servers() as urls:
                results[name].append(run_peer(name, length, arguments.seconds, urls, arguments.areal))
    print(f"{len(PROMPT) + 1} prompt tokens, {length} generated, {IN_FLIGHT} in flight")
    for name in names:
        cpu_ms = statistics.median(cost for cost, _ in results[name])
        rate = statistics.median(rate for _, rate in results[name])
        print(f"  {name:10s} {cpu_ms:7.3f} ms CPU a sample   {rate:8.0f} samples/s")


if __name__ == "__main__":
    main()
