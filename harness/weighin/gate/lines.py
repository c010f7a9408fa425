"""Define the result of ``weighin check``: a list of lines, each with the verdict on one item."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weighin.records.metrics import Metric


class LineVerdict(StrEnum):
    """The verdicts on the lines of a check, from the worst to the best."""

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
"""Tables show this in place of "same" for a budget, because a budget has no earlier figure."""

FAILING: Final = (
    LineVerdict.NOT_OK,
    LineVerdict.REGRESSED,
    LineVerdict.OVER_BUDGET,
    LineVerdict.MISSING,
    LineVerdict.DIFFERS,
)


@dataclass(frozen=True, slots=True)
class Growth:
    """The change of one figure in one phase; ``was`` is None if the baseline file lacks the phase.

    ``step`` is ``now`` - ``was``. If ``was`` is None, ``step`` is ``now`` itself for a time, and
    ``now`` minus the figure of the baseline's highest phase for a size.
    """

    phase: str
    was: int | None
    now: int
    step: int


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict on one item of a check.

    Attributes:
        series: the name of the measurement, or "environment", "budget" or "run".
        what: the metric, budget or setting that is judged, or "outcome", "model" or "cells".
        text: the description of an item without figures.
        metric: the metric of the figures; None for an item without figures.
        was: the figure in the baseline file, or the bound of a budget.
        now: the measured figure.
        allowed: the worst figure that passes.
        excess: how much worse ``now`` is than ``allowed``, as a share of ``was``; at most 0 for a pass.
        phases: the change of each phase, from which ``grown`` is found.
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
    def fails(self) -> bool:
        return self.verdict in FAILING

    @property
    def is_budget(self) -> bool:
        """Whether the line judges a budget; ``was`` is then the bound, not a baseline's figure."""
        return self.metric is not None and self.what != self.metric.title

    @property
    def title(self) -> str:
        """The verdict as text for tables; JSON and JUnit XML contain ``verdict`` instead."""
        is_kept = self.is_budget and self.verdict is LineVerdict.SAME
        return WITHIN_BUDGET if is_kept else self.verdict.value

    @property
    def grown(self) -> Growth | None:
        """The phase that caused the growth of the metric; None if no phase grew.

        Memory that a phase keeps also raises the later peaks. The cause is therefore the first phase
        that grew by 0.5 to 1.5 times the metric's growth in bytes, or else the phase that grew most.
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
    """The result of ``weighin check``: all lines, the worst first, and notes."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.fails)
