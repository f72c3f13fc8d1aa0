"""Who computes what in a step: mini-batches, ranks, micro-batches.

    batch -> mini-batches (one optimizer step each) -> ranks -> micro-batches (one forward and backward pass each)

Units that stay together are groups, whose samples share rows, or single samples where a group does not fit the token
budget or there are fewer groups than mini-batches. Each cut is even in the rows to be computed. Every rank works out
the whole plan by itself and takes its part; all ranks get the same number of micro-batches, as collectives require, so
a rank with less to do computes an empty one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.algorithm.batch import SampleBatch
from headway.config.actor import MicroBatchSpec
from headway.core.packing import balance, pack
from headway.errors import InvalidInput
from services.trainer.layout import MicroBatch, Prefix, num_rows, packed, padded, prefixes


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step."""

    samples: tuple[int, ...]
    """Of all ranks, ascending."""
    micro_batches: tuple[MicroBatch, ...]
    """Of this rank."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples that stay together, and the rows that they take."""

    members: tuple[Prefix, ...]
    rows: int


class Planner:
    """Cuts up batches for one rank.

    Args:
        spec: Token budget and least number of micro-batches.
        is_packed: Rows end to end with shared prefixes; false: one padded line per sample.
    """

    def __init__(self, spec: MicroBatchSpec, *, rank: int, world_size: int, is_packed: bool) -> None:
        self._spec, self._rank, self._world_size, self._is_packed = spec, rank, world_size, is_packed

    def plan(self, batch: SampleBatch, num_minibatches: int) -> list[MiniBatch]:
        """Mini-batches with something to learn; at most `num_minibatches`. What is in each is the same for any ranks.

        Raises:
            InvalidInput: A sample alone is above the token budget; the message names its task.
        """
        members = [prefix for prefix in prefixes(batch) if len(prefix.ids)]
        units = self._groups(members, batch)
        if len(units) < num_minibatches:
            units = self._runs(members, batch)
        parts = balance([unit.rows for unit in units], num_minibatches)
        return [self._minibatch(batch, _members(units, part)) for part in parts if part]

    def _minibatch(self, batch: SampleBatch, members: Sequence[Prefix]) -> MiniBatch:
        units = self._groups(members, batch)
        if len(units) < self._world_size or not all(self._fits(unit) for unit in units):
            units = self._runs(members, batch)
        by_rank = [[units[i] for i in part] for part in balance([unit.rows for unit in units], self._world_size)]
        least = min(self._spec.n_mbs, max(len(part) for part in by_rank))
        packs = [self._pack(part, least) for part in by_rank]
        count = max(len(bins) for bins in packs)
        mine = packs[self._rank] + [[]] * (count - len(packs[self._rank]))
        lay_out = packed if self._is_packed else padded
        samples = tuple(sorted(member.sample for member in members))
        return MiniBatch(samples, tuple(lay_out(batch, part) for part in mine))

    def _groups(self, members: Sequence[Prefix], batch: SampleBatch) -> list[Unit]:
        """Samples of a group together, in the order of the batch."""
        return [self._unit(group) for group in self._by_group(members, batch)]

    def _runs(self, members: Sequence[Prefix], batch: SampleBatch) -> list[Unit]:
        """`granularity` neighbouring samples of a group together."""
        size = self._spec.granularity
        groups = self._by_group(members, batch)
        units = [self._unit(group[i : i + size]) for group in groups for i in range(0, len(group), size)]
        for unit in units:
            if not self._fits(unit):
                raise InvalidInput(self._why_not(unit, batch))
        return units

    @staticmethod
    def _by_group(members: Sequence[Prefix], batch: SampleBatch) -> list[list[Prefix]]:
        groups: dict[int, list[Prefix]] = {}
        for member in members:
            groups.setdefault(int(batch.group_ids[member.sample]), []).append(member)
        return list(groups.values())

    def _pack(self, units: Sequence[Unit], least: int) -> list[list[Prefix]]:
        """Micro-batches of one rank."""
        sizes = [unit.rows for unit in units]
        budget = self._spec.max_tokens_per_mb or sum(sizes)
        bins = pack(sizes, budget, min_bins=least)
        return [_members(units, part) for part in bins]

    def _unit(self, members: Sequence[Prefix]) -> Unit:
        return Unit(tuple(members), num_rows(members, is_shared=self._is_packed))

    def _fits(self, unit: Unit) -> bool:
        return self._spec.max_tokens_per_mb is None or unit.rows <= self._spec.max_tokens_per_mb

    def _why_not(self, unit: Unit, batch: SampleBatch) -> str:
        group = int(batch.group_ids[unit.members[0].sample])
        task = batch.task_ids[group] if group < len(batch.task_ids) else f"number {group}"
        what = "a sample" if len(unit.members) == 1 else f"{len(unit.members)} samples (mb_spec.granularity)"
        return (
            f"{what} of task {task} need {unit.rows} tokens in one micro-batch, "
            f"more than actor.mb_spec.max_tokens_per_mb = {self._spec.max_tokens_per_mb}"
        )


def _members(units: Sequence[Unit], part: Sequence[int]) -> list[Prefix]:
    """The samples of some units, in the order of the batch."""
    return sorted((member for i in part for member in units[i].members), key=lambda member: member.sample)
