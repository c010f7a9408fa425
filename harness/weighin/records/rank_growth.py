"""Compute from records how a strategy's memory grows with the number of ranks (processes)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from weighin.cell import Cell
from weighin.records.floor import floors
from weighin.records.repeats import grouped, latest, middle
from weighin.result import Outcome, Result

_FLAT: Final = 0.25
_LINEAR: Final = 0.75


@dataclass(frozen=True, slots=True)
class RankSeries:
    """The ok results of one strategy, by the number of ranks. ``cell`` has one rank.

    ``charges`` is the memory of all ranks together, without that of the imports, in bytes: from the
    RAM floor if a search found one, else from the median of the cgroup's peaks.
    """

    cell: Cell
    by_ranks: dict[int, list[Result]]
    charges: dict[int, int]
    model_bytes: int | None

    @property
    def copies_per_rank(self) -> float | None:
        """The memory that each further rank adds, in model sizes; None if it cannot be computed."""
        if len(self.charges) < 2 or not self.model_bytes:
            return None
        low, high = min(self.charges), max(self.charges)
        return (self.charges[high] - self.charges[low]) / (high - low) / self.model_bytes

    @property
    def growth(self) -> Literal["flat", "between", "linear"] | None:
        """How much memory each further rank adds, in model sizes; None if that is unknown."""
        if (copies := self.copies_per_rank) is None:
            return None
        if copies < _FLAT:
            return "flat"
        return "linear" if copies >= _LINEAR else "between"


def over_ranks(results: Sequence[Result]) -> list[RankSeries]:
    """Return a ``RankSeries`` for each strategy of a run that was measured with two or more ranks,
    without a RAM limit: page cache fills memory up to a limit.
    """
    found = {
        floor.cell.series: floor.bytes - (floor.import_bytes or 0)
        for floor in floors(results)
        if floor.bytes is not None
    }
    loads = [
        result
        for result in latest(results)
        if (result.outcome, result.cell.operation) == (Outcome.OK, "load")
        and result.cell.ram_limit_bytes is None
    ]
    series = []
    for group in grouped(loads, lambda one: replace(one.cell, ranks=1).series).values():
        ordered = sorted(group, key=lambda each: each.cell.ranks)
        by_ranks = grouped(ordered, lambda each: each.cell.ranks)
        charges = {}
        for ranks, repeats in by_ranks.items():
            floor = found.get(repeats[0].cell.series)
            size = middle(map(charge, repeats)) if floor is None else floor
            if size is not None:
                charges[ranks] = size
        if max(by_ranks) > 1:
            model = next((each.model_bytes for each in group if each.model_bytes), None)
            series.append(RankSeries(replace(group[0].cell, ranks=1), by_ranks, charges, model))
    return series


def charge(result: Result) -> int | None:
    """Return the peak of a cell's cgroup minus the cgroup's usage before the load, in bytes."""
    before = result.baseline.cgroup_bytes if result.baseline else None
    peak = result.peaks.cgroup_bytes
    return None if before is None or peak is None else peak - before


def unreclaimable(result: Result) -> int | None:
    """Return the sampled maximum of the ranks' anonymous and shared memory, above the imports'."""
    most = result.peaks.unreclaimable_sampled_bytes or result.peaks.anon_sampled_bytes
    if most is None or result.baseline is None:
        return None
    before = (result.baseline.anon_bytes + result.baseline.shmem_bytes) * result.cell.ranks
    return max(0, most - before)


def sum_of_peaks(result: Result) -> int | None:
    """Return the sum of the ranks' peak RSS, which counts a shared page once for each rank; None without
    ranks, or if a peak is unknown.
    """
    peaks = [rank.peak_rss_bytes for rank in result.ranks]
    return sum(peak for peak in peaks if peak) if peaks and None not in peaks else None
