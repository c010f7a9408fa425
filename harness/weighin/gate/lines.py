"""Define the gate's result: lines with their verdicts, and the growth of phases."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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


WITHIN_BUDGET: Final = "within budget"
"""The word for people for the verdict "same" on a budget, which is compared with no earlier figure."""

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

    The ``step`` of a new phase is the excess of its figure over the highest phase of the baseline,
    or for a time the whole time of the phase.
    """

    phase: str
    was: int | None
    now: int
    step: int


@dataclass(frozen=True, slots=True)
class Line:
    """One judged item. ``what`` names a metric, a budget, ``outcome`` or a setting.

    Without figures, ``metric`` and ``now`` are None, and ``text`` describes the item. ``was`` is
    the baseline's figure or the budget's bound. ``allowed`` is the worst figure that passes.
    ``excess`` is the distance from ``allowed`` to ``now`` as a share of ``was``, negative for a
    pass.
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
        """Whether the line judges a budget, so that ``was`` is the bound and no baseline figure."""
        return self.metric is not None and self.what != self.metric.title

    @property
    def title(self) -> str:
        """The verdict as tables show it. JSON and JUnit XML have ``verdict`` itself."""
        is_kept = self.is_budget and self.verdict is LineVerdict.SAME
        return WITHIN_BUDGET if is_kept else self.verdict.value

    @property
    def grown(self) -> Growth | None:
        """The phase that explains the metric's growth: the first that grew by about as much.

        Memory that an early phase keeps also raises all later phases, so the first phase is the
        cause.
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
    """The gate's result: all lines, the worst first, with the changed settings and notes."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.verdict in FAILING)
