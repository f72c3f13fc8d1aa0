"""How fast a version is written, against the slower of the disk and the hash on the same bytes.

    python -m benchmarks.weights [--parameters 860000 134515008] [--folder DIR] [--rounds 5]

For each size: the time of `WeightStore.write` (shards, static files, manifest, hashes, fsync, rename), the time of
writing and fsyncing the same bytes plainly, of hashing them, and the ratio to the slower of the two: the limit of a
writer that hashes. Medians over the rounds; each round writes a new version, as training does.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from headway.core.version import PolicyVersion
from services.trainer.weights import WeightStore

LAYER = 4 * 1024 * 1024
STATIC = {"config.json": b"{}" * 400, "tokenizer.json": b" " * 2_000_000, "tokenizer_config.json": b"{}" * 400}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, nargs="+", default=[860_000, 134_515_008])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'parameters':>12} {'MB':>8} {'write version':>14} {'plain write':>12} {'sha256':>9} {'of the limit':>13}")
    for parameters in arguments.parameters:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure(parameters, Path(folder), arguments.rounds)


def measure(parameters: int, folder: Path, rounds: int) -> None:
    tensors = _tensors(parameters)
    data = b"".join(tensor.numpy().tobytes() for _, tensor in tensors)
    store = WeightStore(folder / "weights", STATIC)
    version, plain, hashing = [], [], []
    for step in range(rounds):
        version.append(_seconds(partial(store.write, PolicyVersion(1, step), None, tensors)))
        store.remove_except([], keep_newest=1)
        plain.append(_seconds(partial(_write, folder / f"plain-{step}", data)))
        (folder / f"plain-{step}").unlink()
        hashing.append(_seconds(partial(hashlib.sha256, data)))
    total, write, digest = (statistics.median(values) * 1e3 for values in (version, plain, hashing))
    row = f"{parameters:>12} {len(data) / 1e6:>8.1f} {total:>11.1f} ms {write:>9.1f} ms {digest:>6.1f} ms"
    print(f"{row} {total / max(write, digest):>12.2f}x")
    shutil.rmtree(folder / "weights")


def _tensors(parameters: int) -> list[tuple[str, torch.Tensor]]:
    sizes = [min(LAYER, parameters - start) for start in range(0, parameters, LAYER)]
    return [(f"layer.{number}.weight", torch.randn(size)) for number, size in enumerate(sizes)]


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
