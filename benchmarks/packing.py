"""How evenly and how fast samples are spread over ranks and packed into micro-batches, against AReaL's KK and FFD.

    python -m benchmarks.packing [--samples 128 256 512 1024 2048] [--parts 8] [--budget 10240]

Lengths are log-normal, as completions are. Balance's peer is largest differencing (Karmarkar-Karp), with lists of items
in a heap of partial partitions: AReaL's own where it is installed, a plain one otherwise. Packing's peer is AReaL's
first fit decreasing, where it is installed. Columns: the largest part over the lower bound max(ceil(sum / parts),
longest), milliseconds, and micro-batches over their lower bound ceil(sum / budget).
"""

import argparse
import heapq
import random
import time
from collections.abc import Callable
from typing import Any

from headway.core.packing import balance, pack

REPEATS = 20


def karmarkar_karp(sizes: list[int], num_parts: int) -> list[list[int]]:
    """Put the two partitions with the largest spread together, largest part to smallest, until one is left."""
    heap: list[Any] = []
    for index, size in enumerate(sizes):
        parts = [(size, [index])] + [(0, [])] * (num_parts - 1)
        heap.append((-size, index, parts))
    heapq.heapify(heap)
    counter = len(sizes)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        counter += 1
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], counter, merged))
    return [items for _, items in heap[0][2]]


def peer() -> Callable[[list[int], int], list[list[int]]]:
    """AReaL's, or the plain one."""
    try:
        from areal.utils.seqpack import _kk_partition
    except ImportError:
        return karmarkar_karp
    found: Callable[[list[int], int], list[list[int]]] = _kk_partition
    return found


def packing_peer() -> Callable[[list[int], int], list[list[int]]] | None:
    """AReaL's, where it is installed."""
    try:
        from areal.utils.seqpack import ffd_allocate
    except ImportError:
        return None
    return lambda sizes, budget: ffd_allocate(sizes, budget, 1)  # type: ignore[no-any-return]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the shortest time in milliseconds."""
    best, result = float("inf"), None
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return result, best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--budget", type=int, default=10240)
    arguments = parser.parse_args()
    differencing, first_fit = peer(), packing_peer()
    print(f"{'samples':>8} {'balance':>18} {'differencing':>22} {'faster':>8} {'pack':>20} {'first fit':>20}")
    for samples in arguments.samples:
        rng = random.Random(samples)
        sizes = [min(8192, max(16, int(rng.lognormvariate(6, 1)))) for _ in range(samples)]
        bound = max(-(-sum(sizes) // arguments.parts), *sizes)
        ours, ours_ms = timed(lambda sizes=sizes: balance(sizes, arguments.parts))
        theirs, theirs_ms = timed(lambda sizes=sizes: differencing(sizes, arguments.parts))
        bins, bins_ms = timed(lambda sizes=sizes: pack(sizes, arguments.budget))
        loads = [max(sum(sizes[i] for i in part) for part in parts) / bound for parts in (ours, theirs)]
        bins_bound, fitted = -(-sum(sizes) // arguments.budget), f"{'-':>20}"
        if first_fit is not None:
            found, found_ms = timed(lambda sizes=sizes: first_fit(sizes, arguments.budget))
            fitted = f"{len(found):>7} {found_ms:>9.2f} ms"
        print(
            f"{samples:>8} {loads[0]:>9.5f} {ours_ms:>5.2f} ms {loads[1]:>12.5f} {theirs_ms:>6.2f} ms"
            f" {theirs_ms / ours_ms:>7.1f}x {len(bins):>7}/{bins_bound:<4} {bins_ms:>4.2f} ms {fitted}"
        )


if __name__ == "__main__":
    main()
