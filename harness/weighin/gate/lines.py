"""What a judgement is made of: verdicts, the lines that they are about, and how phases grew."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weighin.records.machine import Difference
from weighin.records.metrics import Metric


class LineVerdict(StrEnum):
    """What is said of one line; from the worst to the best."""

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
    """How one phase's figure changed. ``was`` is None where the phase is new.

    A new phase's ``step`` is what it has beyond the highest that the baseline had anywhere; of a
    time, all of it.
    """

    phase: str
    was: int | None
    now: int
    step: int


@dataclass(frozen=True, slots=True)
class Line:
    """One judgement. ``what`` names a metric, a budget, ``outcome`` or a setting.

    ``text`` says it in words where there are no figures: ``metric`` and ``now`` are None then.
    ``was`` is the baseline's figure or the budget's bound, ``allowed`` what would just have passed;
    ``excess`` is how far ``now`` is beyond that, as a share: negative where it passed.
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
        """The phase in which it grew: the first that grew by about as much as the whole did.

        What was kept since an early phase raises all later ones: the first is where to look.
        """
        if self.was is None or self.now is None or self.now <= self.was or not self.phases:
            return None
        step = self.now - self.was
        if self.metric and self.metric.unit == "bytes":
            for one in self.phases:
                if 0.5 * step <= one.step <= 1.5 * step:
                    return one
        largest = max(self.phases, key=lambda one: one.step)
        return largest if largest.step > 0 else None


@dataclass(frozen=True, slots=True)
class GateResult:
    """All lines, the worst first, and what else is to be said."""

    lines: tuple[Line, ...]
    settings: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Line, ...]:
        """The lines for which the gate fails."""
        return tuple(line for line in self.lines if line.verdict in FAILING)
