"""How fast rewards are, against the same functions without a service.

    python -m benchmarks.reward math    [--seconds 6] [--limit 1.0]
    python -m benchmarks.reward code    [--seconds 6]
    python -m benchmarks.reward latency [--count 2000]

`math`: rewards per second on all cores, while 0, 1 or 5 % of the items never end: because they burn (a sympy call
without end), or because they only wait. Peers: the same function called directly in a loop (times the cores: the most
that this machine can do), a ProcessPoolExecutor, and math-verify with the timeouts that TRL's `accuracy_reward` gives
it. Every item is another one, so nothing comes from the cache; half of the answers are numbers, half are expressions.
`code`: three assertions on a small function. Peer: `subprocess.run` of the interpreter, with the code and assertions.
`latency`: what the service adds to a trivial function for one call at a time.

The client, the service and the workers share the cores, as they do on a laptop.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headway.reward.mathematics import math
from headway.runtime.grpc_client import connect
from headway.runtime.rewards import RewardClient
from headway.runtime.service import READY_PREFIX
from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc
from headway.workflow.errors import RewardTimeout

CORES = os.cpu_count() or 1
IN_FLIGHT = 512
FORMS = ("{n}", "\\frac{{{n}}}{{7}}", "x^2+{n}x", "\\sqrt{{{n}}}+2", "{n}.5", "{n}", "{n},000", "{n}/3")
FOREIGN = """
import time

from headway.reward import reward_function
from headway.reward.mathematics import math as judged


@reward_function(is_pure=True, typical_s=0.001, imports=("headway.reward.warm_mathematics",))
def math(completion, answer):
    "math, but for the items that never end."
    if completion.startswith("burn"):
        while True:
            sum(range(1000))
    if completion.startswith("wait"):
        time.sleep(3600)
    return judged(completion, answer=answer)
"""


@dataclass(frozen=True)
class Question:
    """What there is to score, and what the reward must be."""

    completion: str
    reference: str
    is_right: bool


def questions() -> Iterator[Question]:
    """Questions without end, each another one; every second answer is right."""
    for number in itertools.count(11):
        form, is_right = FORMS[number // 2 % len(FORMS)], number % 2 == 1
        answer = form.format(n=number if is_right else number + 1)
        yield Question(f"In {number} steps we get \\boxed{{{answer}}}.", form.format(n=number), is_right)


def rate_of(call: Callable[[Question], bool], seconds: float) -> float:
    """Calls per second in this process."""
    asked = questions()
    for _ in range(200):
        call(next(asked))
    started = time.perf_counter()
    for count in itertools.count(1):
        call(next(asked))
        if (elapsed := time.perf_counter() - started) > seconds:
            return count / elapsed
    raise AssertionError("unreachable")


def direct(question: Question) -> bool:
    return math(question.completion, answer=question.reference)


def as_trl(question: Question) -> bool:
    """The calls of TRL's accuracy_reward: both texts parsed, with math-verify's own timeouts."""
    from math_verify import LatexExtractionConfig, parse, verify

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    gold = parse(f"${question.reference}$")
    answer = parse(question.completion, extraction_config=boxed, extraction_mode="first_match")
    return bool(gold) and bool(verify(gold, answer))


def executor_rate(seconds: float) -> float:
    """Calls per second through a ProcessPoolExecutor, all cores, a few at a time."""
    asked = questions()
    with ProcessPoolExecutor(CORES) as pool:
        list(pool.map(direct, itertools.islice(asked, 400)))
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            batch = list(itertools.islice(asked, IN_FLIGHT))
            count += len(list(pool.map(direct, batch, chunksize=8)))
        return count / (time.perf_counter() - started)


@asynccontextmanager
async def service(reward: str) -> AsyncIterator[str]:
    """A reward service as a process of its own; its address."""
    with tempfile.TemporaryDirectory() as folder:
        command = (
            sys.executable,
            "-m",
            "services.reward",
            "--config",
            experiment_in(folder, reward),
            "--run-dir",
            folder,
        )
        environment = os.environ | {"PYTHONPATH": folder}
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
        assert process.stdout is not None
        ready = json.loads((await process.stdout.readline()).decode().removeprefix(READY_PREFIX))
        try:
            yield f"127.0.0.1:{ready['ports']['grpc']}"
        finally:
            process.kill()
            await process.wait()


def experiment_in(folder: str, reward: str) -> str:
    """Write an experiment file, and the functions that it names."""
    Path(folder, "bench_rewards.py").write_text(FOREIGN)
    path = Path(folder, "experiment.yaml")
    path.write_text(
        "experiment_name: bench\ntrial_name: reward\nactor: {ppo_n_minibatches: 1}\n"
        f"reward: {{num_workers: {CORES}, {reward}}}\n"
    )
    return str(path)


@dataclass
class Load:
    """Clients that keep IN_FLIGHT items in flight, of which some never end."""

    client: RewardClient
    hanging: float
    kind: str
    num_ended: int = 0
    num_timeouts: int = 0
    num_wrong: int = 0

    async def run(self) -> None:
        asked = questions()
        await asyncio.gather(*[self._keep_asking(asked) for _ in range(IN_FLIGHT)])

    async def _keep_asking(self, asked: Iterator[Question]) -> None:
        for question in asked:
            every = round(1 / self.hanging) if self.hanging else 0
            never_ends = bool(every) and hash(question.completion) % every == 0
            completion = f"{self.kind} {question.completion}" if never_ends else question.completion
            try:
                reward = await self.client.score(completion, data={"answer": question.reference})
                self.num_ended += 1
                self.num_wrong += never_ends or reward != question.is_right
            except RewardTimeout:
                self.num_timeouts += 1
                self.num_wrong += not never_ends


async def service_rate(seconds: float, limit_s: float, hanging: float, kind: str) -> tuple[float, float, int]:
    """Answers per second: all, and those of items that ended by themselves; and how many were wrong."""
    async with (
        service(f"function: bench_rewards.math, timeout_s: {limit_s}") as address,
        RewardClient(timeout_s=limit_s, addresses=[address]) as client,
    ):
        load = Load(client, hanging, kind)
        running = asyncio.ensure_future(load.run())
        await asyncio.sleep(2 * limit_s)
        ended, timeouts, started = load.num_ended, load.num_timeouts, time.perf_counter()
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - started
        ended, timeouts = load.num_ended - ended, load.num_timeouts - timeouts
        running.cancel()
        return (ended + timeouts) / elapsed, ended / elapsed, load.num_wrong


def bench_math(seconds: float, limit_s: float) -> None:
    bare = rate_of(direct, seconds)
    goal = CORES * bare
    print(f"direct call, one process        {bare:8.0f} /s     x {CORES} cores = {goal:.0f}")
    print(f"math-verify as TRL calls it     {rate_of(as_trl, seconds):8.0f} /s     in one process, as TRL does")
    print(
        f"ProcessPoolExecutor             {executor_rate(seconds):8.0f} /s     a hanging item takes a worker for ever"
    )
    for hanging, kind in ((0.0, "burn"), (0.01, "wait"), (0.01, "burn"), (0.05, "wait"), (0.05, "burn")):
        total, ended, wrong = uvloop.run(service_rate(seconds, limit_s, hanging, kind))
        what = f"service, {hanging:4.0%} {kind if hanging else ''}"
        print(f"{what:31} {total:8.0f} /s     {total / goal:.2f} of cores x direct; {ended:.0f} ended, {wrong} wrong")


CODE = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]


def bare_code_rate(seconds: float) -> float:
    """Runs per second of a bare subprocess, on all cores."""

    def run_once(number: int) -> None:
        subprocess.run([sys.executable, "-c", "\n".join([f"# {number}", CODE, *TESTS])], check=True, timeout=10)

    with ThreadPoolExecutor(CORES) as pool:
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            count += len(list(pool.map(run_once, range(32))))
        return count / (time.perf_counter() - started)


async def service_code_rate(seconds: float) -> float:
    async with service("function: code") as address, RewardClient(timeout_s=15, addresses=[address]) as client:
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            asked = [client.score(f"```python\n# {count + n}\n{CODE}```", data={"test_list": TESTS}) for n in range(32)]
            rewards = await asyncio.gather(*asked)
            assert rewards == [1.0] * 32
            count += 32
        return count / (time.perf_counter() - started)


def bench_code(seconds: float) -> None:
    bare = bare_code_rate(seconds)
    sandboxed = uvloop.run(service_code_rate(seconds))
    print(f"bare subprocess.run     {bare:6.1f} /s")
    print(f"service, sandboxed      {sandboxed:6.1f} /s     {sandboxed / bare:.2f} of bare")


async def latencies(count: int) -> list[float]:
    """Milliseconds of calls one after another, each of another item."""
    async with service("function: exact") as address:
        channel = connect(address)
        stub = rpc.RewardStub(channel)
        measured = []
        for number in range(count + 200):
            item = pb.ScoreItem(completion=f"{number}", data_json=b'{"answer": "1"}')
            started = time.perf_counter()
            async for reply in stub.Score(pb.ScoreRequest(items=[item]), timeout=10):
                assert len(reply.results) == 1
            measured.append(1000 * (time.perf_counter() - started))
        await channel.close()
        return measured[200:]


def bench_latency(count: int) -> None:
    measured = sorted(uvloop.run(latencies(count)))
    p50, p99 = statistics.median(measured), measured[int(0.99 * len(measured))]
    print(f"added to a trivial function, one call at a time: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["math", "code", "latency"])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--limit", type=float, default=1.0, help="limit of an item, seconds")
    parser.add_argument("--count", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.what == "math":
        bench_math(arguments.seconds, arguments.limit)
    elif arguments.what == "code":
        bench_code(arguments.seconds)
    else:
        bench_latency(arguments.count)


if __name__ == "__main__":
    main()
