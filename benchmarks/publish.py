"""From weights in the trainer to two engines that serve them: total, and the pause that requests see, by disk.

    python -m benchmarks.publish [--parameters-like smol tiny] [--rounds 5]

Total: a version is written (hashed, fsynced, named), then two built-in engines, each a process, are moved to it by the
fleet: read, checked, swapped, verified. The limit is the bytes over the slowest of three rates measured here on the
same bytes: write with fsync, sha256, read. Beside it `save_pretrained` and a reload in two processes, which checks
nothing. Medians.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.update import CASES, reference_model, write_config
from benchmarks.weights import _write
from headway.core.version import PolicyVersion
from headway.runtime.http_server import serve_http
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from services.inference.builtin import BuiltinSettings, start_builtin
from services.inference.http_api import create_app
from services.inference.tiny_model import make_tokenizer
from services.rollout_controller.fleet import Fleet, FleetOptions
from services.trainer.weights import WeightStore

NUM_ENGINES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters-like", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.parameters_like:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(name, Path(folder), arguments.rounds))


async def measure(name: str, folder: Path, rounds: int) -> None:
    (folder / "config").mkdir()
    write_config(CASES[name], folder / "config")
    make_tokenizer().save_pretrained(folder / "config")
    model = reference_model(folder / "config")
    tensors = {key: value.detach() for key, value in model.named_parameters()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    static = {file.name: file.read_bytes() for file in (folder / "config").iterdir()}
    store = WeightStore(folder / "weights", static)
    store.write(PolicyVersion(1, 0), None, tensors.items())
    writing, moving, pausing = [], [], []
    async with AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(Supervisor())
        fleet = await stack.enter_async_context(Fleet(FleetOptions(store.root), supervisor, Waits()))
        await fleet.move_to(PolicyVersion(1, 0))
        for number in range(NUM_ENGINES):
            fleet.add(str(number), stack.enter_context(Process(store.root)).url, "builtin")
        await fleet.wait_for_step(0)
        for step in range(1, rounds + 1):
            version = PolicyVersion(1, step)
            start = time.perf_counter()
            await asyncio.to_thread(store.write, version, None, tensors.items())
            writing.append(time.perf_counter() - start)
            report = await fleet.move_to(version)
            moving.append(report.total_s)
            pausing.append(report.pause_s)
            assert report.num_moved == NUM_ENGINES
            store.remove_except([], keep_newest=1)
    total = statistics.median([a + b for a, b in zip(writing, moving, strict=True)])
    write, move, pause = (statistics.median(values) for values in (writing, moving, pausing))
    limits = rates(tensors, folder, rounds)
    plain = statistics.median(reload(model, folder, rounds))
    limit = max(limits.values())
    print(f"{name}: {size / 1e6:.1f} MB to {NUM_ENGINES} engines")
    print(
        f"  total {total:7.3f} s = write {write:.3f} + move {move:.3f}; {total / limit:.2f} of the limit {limit:.3f} s"
    )
    print(f"  pause {pause:7.3f} s, {pause / total:.2f} of the total")
    print("  limits " + ", ".join(f"{what} {seconds:.3f} s" for what, seconds in limits.items()))
    print(f"  save_pretrained and reload in {NUM_ENGINES} processes {plain:7.3f} s", flush=True)


class Process:
    """A built-in engine in a process of its own."""

    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._url: Any = context.Queue()
        self._process = context.Process(target=serve, args=(root, self._url), daemon=True)

    def __enter__(self) -> "Process":
        self._process.start()
        self.url: str = self._url.get()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def serve(root: Path, url: Any) -> None:
    async def run() -> None:
        settings = BuiltinSettings(root / "v1.0", "v1.0", (root,), seed=0)
        async with start_builtin(settings) as builtin, serve_http(create_app(builtin), "127.0.0.1", 0) as port:  # type: ignore[arg-type]
            url.put(f"http://127.0.0.1:{port}")
            await builtin.engine.wait()

    asyncio.run(run())


def rates(tensors: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Seconds that the same bytes take, one way each."""
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    file = folder / "plain"
    works: dict[str, Callable[[], object]] = {
        "write": lambda: _write(file, data), "sha256": lambda: hashlib.sha256(data), "read": file.read_bytes,
    }  # fmt: skip
    return {what: statistics.median(timed(work) for _ in range(rounds)) for what, work in works.items()}


def reload(model: Any, folder: Path, rounds: int) -> list[float]:
    """Seconds of `save_pretrained` and `from_pretrained` in processes that are up already."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(NUM_ENGINES) as pool:
        seconds = []
        for number in range(rounds + 1):
            start = time.perf_counter()
            model.save_pretrained(folder / f"saved-{number % 2}")
            pool.map(load, [folder / f"saved-{number % 2}"] * NUM_ENGINES, chunksize=1)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def load(folder: Path) -> None:
    torch.set_num_threads(1)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
