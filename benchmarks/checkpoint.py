"""How long a checkpoint holds up training: copied and written beside it, against written at once.

    python -m benchmarks.checkpoint [--parameters 134515008] [--folder DIR] [--rounds 3]

The state is that of AdamW in float32: weights and two moments. `copy` is what the loop waits for; `written` is until
the checkpoint is complete (tensors, fsync, hashes, manifest, names), which goes on beside the next steps. Medians.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.core.version import PolicyVersion
from services.trainer.background import in_background
from services.trainer.checkpoint import CheckpointStore, TrainerRecord, copy_tensors, save_tensors

LAYER = 4 * 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, nargs="+", default=[860_000, 134_515_008])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'parameters':>12} {'MB':>8} {'at once':>12} {'copy':>12} {'written':>12} {'stall':>8}")
    for parameters in arguments.parameters:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure(parameters, Path(folder), arguments.rounds)


def measure(parameters: int, folder: Path, rounds: int) -> None:
    state = adam_state(parameters)
    at_once, copying, written = [], [], []
    store = CheckpointStore(folder, keep_last=1)
    for number in range(rounds):
        start = time.perf_counter()
        save(store, PolicyVersion(1, 2 * number), state)
        at_once.append(time.perf_counter() - start)
        start = time.perf_counter()
        copied = copy_tensors(state)
        copying.append(time.perf_counter() - start)
        work = partial(save, store, PolicyVersion(1, 2 * number + 1), copied)
        in_background("save", work).result()
        written.append(time.perf_counter() - start)
    size = sum(tensor.nbytes for part in ("model", "optimizer") for tensor in tensors_of(state[part]))
    now, copy, whole = (statistics.median(values) * 1e3 for values in (at_once, copying, written))
    print(f"{parameters:>12} {size / 1e6:>8.0f} {now:>9.1f} ms {copy:>9.1f} ms {whole:>9.1f} ms {copy / now:>8.3f}")


def save(store: CheckpointStore, version: PolicyVersion, state: dict[str, Any]) -> None:
    aside = store.begin(version)
    save_tensors(aside, state)
    store.complete(aside, TrainerRecord(version))


def adam_state(parameters: int) -> dict[str, Any]:
    sizes = [min(LAYER, parameters - start) for start in range(0, parameters, LAYER)]
    weights = {f"layer.{number}.weight": torch.randn(size) for number, size in enumerate(sizes)}
    moments = {name: {"exp_avg": torch.randn_like(w), "exp_avg_sq": torch.rand_like(w)} for name, w in weights.items()}
    return {"model": weights, "optimizer": moments, "rng": torch.get_rng_state()}


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in state.values():
        found += tensors_of(value) if isinstance(value, dict) else [value]
    return found


if __name__ == "__main__":
    main()
