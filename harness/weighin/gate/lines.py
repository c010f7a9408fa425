"""The result of a gate: lines with their verdicts, and the growth of phases."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weighin.records.machine import Difference
from weighin.records.metrics import Metric


class LineVerdict(StrEnum):
    """The verdict on one line, from the worst to the best."""

    NOT_OK = "not ok"
    REGRESSED = "regressed"
    OVER_BUDGET = "over budget"
    MISSING = "missing"
    DIFFERS = "differs"
    CHANGED = "changed"
    IMPROVED = "improved"
    NEW = "new"
    EXPECTED = "expected"
    SAME = "same"


FAILING: Final = (
    LineVerdict.NOT_OK,
    LineVerdict.REGRESSED,
    LineVerdict.OVER_BUDGET,
    LineVerdict.MISSING,
    LineVerdict.DIFFERS,
)


@dataclass(frozen=True, slots=True)
class Growth:
    """The change of one phase's figure. ``was`` is None if the phase is new.

    The ``step`` of a new phase is its excess over the highest phase of the baseline; for a time it
    is the whole time.
    """

    phase: str
    was: int | None
    now: int
    step: int


@dataclass(frozen=True, slots=True)
class Line:
    """One judged item. ``what`` names a metric, a budget, ``outcome`` or a setting.

    Without figures, ``metric`` and ``now`` are None, and ``text`` describes the item. ``was`` is
    the baseline's figure or the budget's bound, ``allowed`` the last figure that passes, and
    ``excess`` the distance of ``now`` beyond it as a share of ``was``, negative if it passed.
    """

    verdict: LineVerdict
    series: str
    what: str
    text: str = ""
    metric: Metric | None = None
    was: int | None = None
    now: int | None = None
    allowed: int | None = None
    excess: float = math.inf
    phases: tuple[Growth, ...] = ()

    @property
    def is_budget(self) -> bool:
        """Whether it judges a budget: ``was`` is the budget's bound, and no baseline's figure."""
        return self.metric is not None and self.what != self.metric.title

    @property
    def grown(self) -> Growth | None:
        """The phase that explains the growth: the first that grew by about the same amount.

        Memory that an early phase keeps raises all later phases too, so the first is the cause.
        """
        if self.was is None or self.now is None or self.now <= self.was or not self.phases:
            return None
        step = self.now - self.was
        if self.metric and self.metric.unit == "bytes":
            for phase in self.phases:
                if 0.5 * step <= phase.step <= 1.5 * step:
                    return phase
        largest = max(self.phases, key=lambda phase: phase.step)
        return largest if largest.step > 0 else None


@dataclass(frozen=True, slots=True)
class GateResult:
    """All lines, the worst first, with the changed settings and notes."""

    lines: tuple[Line, ...]
    settings: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Line, ...]:
        """The lines that make the gate fail."""
        return tuple(line for line in self.lines if line.verdict in FAILING)
