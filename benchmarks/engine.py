"""How fast the built-in engine generates, against `generate` of transformers in the same process.

    python benchmarks/engine.py [--model FOLDER]... [--threads 1] [--repeat 3] [--json FILE]

Tokens per second that somebody asked for. `generate` takes requests in batches as large as the engine has slots, each
until its longest ends; it returns no log-probabilities, the engine does. `equal`: every prompt and every answer has the
same length. `ragged`: prompts differ, and answers are uniform between 1/8 and all of the length. `http`: groups of
short answers through the engine's HTTP API, as the quickstart has them. The two take turns; medians are shown.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.runtime.http_server import serve_http
from services.inference.builtin import BuiltinEngine, BuiltinSettings, start_builtin
from services.inference.engine import EngineSettings
from services.inference.http_api import create_app
from services.inference.parameters import SamplingParams
from services.inference.rows import Progress, Request

CHAR_MODEL = Path(__file__).parents[1] / "configs" / "models" / "sort_digits"
CLOCK = time.perf_counter
GOALS = {"equal": 1.0, "ragged": 1.4}


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    num_slots: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass
class Row:
    """One line of the table: tokens per second."""

    model: str
    load: str
    engine: float
    generate: float
    goal: float

    @property
    def ratio(self) -> float:
        return self.engine / self.generate


def loads_of(vocab_size: int, num_slots: int, num_batches: int, length: int) -> list[Load]:
    rng = np.random.default_rng(0)
    count = num_slots * num_batches

    def prompts(sizes: list[int]) -> list[list[int]]:
        return [rng.integers(4, vocab_size, size).tolist() for size in sizes]

    ragged = rng.integers(length // 8, length + 1, count).tolist()
    return [
        Load("equal", prompts([16] * count), [length] * count, num_slots),
        Load("ragged", prompts(rng.integers(8, 25, count).tolist()), ragged, num_slots),
    ]


async def run_engine(builtin: BuiltinEngine, load: Load) -> float:
    """Seconds for all of it."""
    loop, none = asyncio.get_running_loop(), frozenset[int]()
    ends: list[asyncio.Future[Progress]] = [loop.create_future() for _ in load.prompts]
    requests = [
        Request(str(i), prompt, SamplingParams(max_new_tokens=length), none, none, i, False, ends[i].set_result)
        for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
    ]
    start = CLOCK()
    builtin.engine.submit(requests)
    results = await asyncio.gather(*ends)
    seconds = CLOCK() - start
    assert [len(result.output_ids) for result in results] == load.lengths
    await builtin.engine.call(builtin.engine.flush_cache)
    return seconds


def run_generate(model: Any, load: Load) -> float:
    """Seconds for all of it, in batches of `num_slots`."""
    start = CLOCK()
    for first in range(0, len(load.prompts), load.num_slots):
        prompts = load.prompts[first : first + load.num_slots]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        length = max(load.lengths[first : first + load.num_slots])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=length,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        assert output.shape[1] == longest + length
    return CLOCK() - start


async def compare(folder: Path, args: argparse.Namespace, num_slots: int, num_batches: int, length: int) -> list[Row]:
    """The engine and `generate` on one model, taking turns."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    settings = BuiltinSettings(
        folder=folder, threads=args.threads, engine=EngineSettings(max_running_requests=num_slots)
    )
    rows = []
    async with start_builtin(settings) as builtin:
        for load in loads_of(builtin.engine.model.vocab_size, num_slots, num_batches, length):
            engine_s, generate_s = [], []
            for _ in range(args.repeat):
                engine_s.append(await run_engine(builtin, load))
                generate_s.append(run_generate(model, load))
            rate = [load.num_tokens / statistics.median(seconds) for seconds in (engine_s, generate_s)]
            rows.append(Row(folder.name, f"{load.name} {num_slots}", rate[0], rate[1], GOALS[load.name]))
            print(f"  {folder.name} {load.name}: {rate[0]:.0f} {rate[1]:.0f}", file=sys.stderr)
    return rows


@asynccontextmanager
async def http_engine(folder: Path, num_slots: int) -> AsyncIterator[aiohttp.ClientSession]:
    settings = BuiltinSettings(folder=folder, engine=EngineSettings(max_running_requests=num_slots))
    async with (
        start_builtin(settings) as builtin,
        serve_http(cast(Any, create_app(builtin)), "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield session


async def measure_http(folder: Path, repeat: int) -> dict[str, float]:
    """Samples per second of 16 groups of 16 samples of 9 tokens: a call for each group, and a call for each sample."""
    rng = np.random.default_rng(1)
    sampling = {"max_new_tokens": 9, "ignore_eos": True, "stream_interval": 64}
    rates: dict[str, list[float]] = {"a call for each group": [], "a call for each sample": []}
    async with http_engine(folder, num_slots=256) as session:

        async def call(prompts: list[list[int]], stream: bool) -> None:
            body = {"input_ids": prompts, "return_logprob": True, "stream": stream, "sampling_params": sampling}
            async with session.post("/generate", json=body) as response:
                await response.read()

        for _ in range(repeat + 1):
            groups = [[rng.integers(4, 60, 14).tolist()] * 16 for _ in range(16)]
            for name, calls in (
                ("a call for each group", groups),
                ("a call for each sample", [[prompt] for group in groups for prompt in group]),
            ):
                start = CLOCK()
                await asyncio.gather(*(call(prompts, stream=True) for prompts in calls))
                rates[name].append(256 / (CLOCK() - start))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def make_char_model(folder: Path) -> Path:
    """The quickstart's model of 0.86 M parameters, with random weights."""
    torch.manual_seed(0)
    config = AutoModelForCausalLM.from_config(_config(CHAR_MODEL))
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(CHAR_MODEL).save_pretrained(folder)
    return folder


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


async def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        char_model = make_char_model(Path(temporary) / "char-0.86M")
        rows = await compare(char_model, args, num_slots=16, num_batches=4, length=64)
        rows += await compare(char_model, args, num_slots=64, num_batches=4, length=64)
        http = await measure_http(char_model, args.repeat)
        for folder in args.model:
            rows += await compare(folder, args, num_slots=16, num_batches=2, length=32)
    show(rows, http)
    if args.json:
        args.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "http": http}, indent=1))
    if any(row.ratio < row.goal for row in rows):
        sys.exit(1)


def show(rows: list[Row], http: dict[str, float]) -> None:
    print(f"{'model':24} {'load':12} {'engine':>10} {'generate':>10} {'ratio':>6} {'goal':>5}   tokens/s")
    for row in rows:
        print(
            f"{row.model:24} {row.load:12} {row.engine:10.0f} {row.generate:10.0f} {row.ratio:6.2f} {row.goal:5.1f}"
            f"   {'' if row.ratio >= row.goal else 'missed'}"
        )
    for name, rate in http.items():
        print(f"http, 16 x 16 samples of 9 tokens, {name}: {rate:.0f} samples/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[], help="another model folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the CPU, for a machine that is busy")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        CLOCK = time.process_time
    asyncio.run(main(arguments))
