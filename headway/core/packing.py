"""Put samples of different lengths into as few micro-batches as possible, and spread them evenly over ranks.

Both rules are deterministic and look at sizes only, so every rank works out the same answer by itself.

`balance` deals the largest item to the emptiest part, then evens out the fullest part and an emptier one by the move or
exchange that fits their difference best. On sequence lengths it ends at the lower bound ceil(sum / parts) or a token
above, as Karmarkar-Karp's differencing does, in a fraction of its time: see test_packing_properties.py.

`pack` needs ceil(sum / capacity) bins at least. It tries to balance into that many; where that does not fit, one more,
up to what best-fit decreasing needs, which is at most 11/9 of the optimum plus 1.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

MAX_EXCHANGES = 1000
"""Exchanges that `balance` tries at most."""


def pack(sizes: Sequence[int], capacity: int, *, min_bins: int = 1) -> list[list[int]]:
    """Indices of `sizes` in evenly filled bins whose sums are at most `capacity`; no bin is empty.

    With `min_bins` there are no fewer bins than that, as far as there are items.

    Raises:
        ValueError: One size alone is above the capacity; the message names its index.

    Example:
        >>> pack([5, 4, 3, 3, 1], capacity=8)
        [[0, 3], [1, 2, 4]]
    """
    for index, size in enumerate(sizes):
        if size > capacity:
            raise ValueError(f"item {index} of size {size} is larger than the capacity of {capacity}")
    if not sizes:
        return []
    greedy = _best_fit_decreasing(sizes, capacity)
    fewest = min(len(sizes), max(min_bins, -(-sum(sizes) // capacity), 1))
    for num_bins in range(fewest, max(fewest + 1, len(greedy))):
        bins = _balance(sizes, num_bins, good_enough=capacity)
        if max(sum(sizes[i] for i in part) for part in bins) <= capacity:
            return [part for part in bins if part]
    return greedy


def balance(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `sizes` in `num_parts` parts with nearly equal sums; a part is sorted, and empty if items are too few.

    Example:
        >>> balance([8, 7, 6, 5, 4], 2)
        [[0, 1], [2, 3, 4]]
    """
    return _balance(sizes, num_parts, good_enough=max(-(-sum(sizes) // num_parts), max(sizes, default=0)))


def _balance(sizes: Sequence[int], num_parts: int, *, good_enough: int) -> list[list[int]]:
    """`balance`, until the largest sum is at most `good_enough`."""
    parts = _largest_first(sizes, num_parts)
    sums = [sum(size for size, _ in part) for part in parts]
    for _ in range(MAX_EXCHANGES):
        if max(sums) <= good_enough or not _relieve_fullest(parts, sums):
            break
    return sorted(sorted(index for _, index in part) for part in parts)


Part = list[tuple[int, int]]
"""(size, index), by ascending size."""


def _largest_first(sizes: Sequence[int], num_parts: int) -> list[Part]:
    """Deal the items, largest first, to the part with the smallest sum, and of those with the fewest items."""
    parts: list[Part] = [[] for _ in range(num_parts)]
    heap = [(0, 0, number) for number in range(num_parts)]
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size, (total, count, number) = sizes[index], heap[0]
        heapq.heapreplace(heap, (total + size, count + 1, number))
        parts[number].append((size, index))
    for part in parts:
        part.reverse()
    return parts


def _relieve_fullest(parts: list[Part], sums: list[int]) -> bool:
    """Even out the fullest part and the emptiest one with which it works; whether there was one."""
    order = sorted(range(len(sums)), key=lambda number: (sums[number], number))
    fullest = order.pop()
    for other in order:
        gain = _even_out(parts[fullest], parts[other], sums[fullest] - sums[other])
        if gain > 0:
            sums[fullest] -= gain
            sums[other] += gain
            return True
    return False


def _even_out(full: Part, empty: Part, difference: int) -> int:
    """Move an item, or exchange two, so that the sums come closest; how much moved over, 0 if nothing helps.

    A shift of g leaves |difference - 2 g|: the best g is half the difference, and any 0 < g < difference helps.
    """
    target = difference / 2
    best = (target, 0, -1, -1)
    for i, (size, _) in enumerate(full):
        if best[0] < 1:
            break
        j = bisect_left(empty, (size - target, -1))
        for k in (j - 1, j):
            given_back = empty[k][0] if 0 <= k < len(empty) else 0
            shift = size - given_back
            if 0 < shift < difference and abs(target - shift) < best[0]:
                best = (abs(target - shift), shift, i, k if 0 <= k < len(empty) else -1)
    _, shift, i, k = best
    if shift > 0:
        moved = full.pop(i)
        if k >= 0:
            insort(full, empty.pop(k))
        insort(empty, moved)
    return shift


def _best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each item, largest first, where it leaves the least room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(rooms, (sizes[index], -1))
        room, number = rooms.pop(place) if place < len(rooms) else (capacity, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return sorted(sorted(part) for part in bins)
