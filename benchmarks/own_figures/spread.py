"""Summarise repeated figures: the median with the range, and the gaps between the samples of a sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import Final

_PERCENT: Final = 99


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated figures, the lower one of two, and their whole range."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median_low(values), min(values), max(values))

    def text(self, factor: float, digits: int) -> str:
        """Return the figures divided by ``factor``; the range is left out if it is the median."""
        median, lowest, highest = (
            f"{one / factor:.{digits}f}" for one in (self.median, self.lowest, self.highest)
        )
        return median if lowest == highest else f"{median} ({lowest}-{highest})"


@dataclass(frozen=True, slots=True)
class Gaps:
    """The times from each sample to the next. At most 1 % of them are longer than the ``most_ns``."""

    median_ns: int
    most_ns: int
    largest_ns: int

    @classmethod
    def between(cls, times_ns: Sequence[int]) -> Gaps:
        """Return the gaps between samples at these times, of which there are at least two."""
        gaps = sorted(after - before for before, after in pairwise(times_ns))
        rank = math.ceil(len(gaps) * _PERCENT / 100)
        return cls(median_low(gaps), gaps[rank - 1], gaps[-1])


def errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the lowest and the highest error of pairs (figure, truth), as shares of the truth.

    An error is negative if the figure is too small.
    """
    found = [figure / truth - 1 for figure, truth in pairs]
    return min(found), max(found)
