"""The judgement: every series and metric beside its baseline and its budgets, the worst first."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from harness.gate.baseline import Baseline, Rules
from harness.gate.budgets import Budget
from harness.gate.metrics import METRICS, Metric, Tolerance
from harness.gate.series import Figure, Series
from harness.gate.settings import Difference, Setting, differences, spoils_times
from harness.record import Outcome


class Verdict(StrEnum):
    """What is said of one line; from the worst to the best."""

    REGRESSED = "regressed"
    OVER_BUDGET = "over budget"
    MISSING = "missing"
    DIFFERS = "differs"
    CHANGED = "changed"
    IMPROVED = "improved"
    NEW = "new"
    SAME = "same"


FAILING: Final = (Verdict.REGRESSED, Verdict.OVER_BUDGET, Verdict.MISSING, Verdict.DIFFERS)
_ORDER: Final = tuple(Verdict)
_NOT_MEASURED: Final = (Outcome.SKIPPED, Outcome.MEASUREMENT_FAILED)


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

    verdict: Verdict
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
class Judgement:
    """All lines, the worst first, and what else is to be said."""

    lines: tuple[Line, ...]
    settings: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Line, ...]:
        """The lines for which the gate fails."""
        return tuple(line for line in self.lines if line.verdict in FAILING)


def judge(
    baseline: Baseline | None,
    rules: Rules,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
) -> Judgement:
    """Compare what was measured with a baseline, where there is one, and with the budgets."""
    lines: list[Line] = []
    found: list[Difference] = []
    notes: list[str] = []
    if baseline:
        found = differences(baseline.environment, environment, rules.policies or {})
        lines += _settings(found)
        tolerances = rules.tolerances
        if spoils_times(found):
            tolerances = {n: t for n, t in tolerances.items() if METRICS[n].portable}
            if len(tolerances) < len(rules.tolerances):
                notes.append(
                    "times are not judged: they were measured on another machine or setting"
                )
        for name in dict.fromkeys([*baseline.series, *series]):
            lines += _series(name, baseline.series.get(name), series.get(name), tolerances)
    for budget in rules.budgets:
        lines += _budget(budget, series)
    if baseline and not baseline.series.keys() & series.keys():
        first, other = next(iter(baseline.series), "nothing"), next(iter(series), "nothing")
        notes.append(f"no series is in both: the baseline has {first}, the run {other}, for one")
    notes += _noisy(baseline, rules) if baseline else []
    ordered = sorted(lines, key=lambda line: (_ORDER.index(line.verdict), -line.excess))
    return Judgement(tuple(ordered), tuple(found), tuple(notes))


def _settings(found: Iterable[Difference]) -> Iterator[Line]:
    for one in found:
        verdict = Verdict.DIFFERS if one.policy == "fail" else Verdict.CHANGED
        yield Line(verdict, "environment", one.name, str(one))


def _series(
    name: str, was: Series | None, now: Series | None, tolerances: Mapping[str, Tolerance]
) -> Iterator[Line]:
    if was is None:
        assert now is not None
        yield Line(Verdict.NEW, name, "outcome", f"not in the baseline; {now.outcome}")
        return
    if now is None:
        yield Line(
            Verdict.MISSING, name, "outcome", f"was not measured; {was.outcome} in the baseline"
        )
        return
    yield _outcome(name, was, now)
    if was.model_bytes and now.model_bytes and was.model_bytes != now.model_bytes:
        text = f"another model: {was.model_bytes:,} bytes -> {now.model_bytes:,} bytes"
        yield Line(Verdict.DIFFERS, name, "model", text)
        return
    if not (was.is_ok and now.is_ok):
        return  # the peak of a cell that was cut off says nothing of its need
    for metric_name, tolerance in tolerances.items():
        metric = METRICS[metric_name]
        before, after = was.figures.get(metric_name), now.figures.get(metric_name)
        if before and after:
            phases = _growth(metric, was, now)
            yield judge_figure(name, metric, tolerance, before, after, phases)
        elif before:
            yield Line(Verdict.MISSING, name, metric.title, f"{metric.title} was not measured")


def _outcome(name: str, was: Series, now: Series) -> Line:
    if was.outcome == now.outcome or (was.is_ok and now.is_ok):
        return Line(Verdict.SAME, name, "outcome", now.outcome, excess=-math.inf)
    text = f"{was.outcome} -> {now.outcome}" + (f": {now.message}" if now.message else "")
    lost = was.is_ok or any(outcome in now.outcome for outcome in _NOT_MEASURED)
    worse = Verdict.REGRESSED if lost else Verdict.CHANGED
    return Line(Verdict.IMPROVED if now.is_ok else worse, name, "outcome", text)


def judge_figure(
    name: str,
    metric: Metric,
    tolerance: Tolerance,
    was: Figure,
    now: Figure,
    phases: tuple[Growth, ...],
) -> Line:
    """Judge one figure: the median of the repeats, against the band of the baseline's repeats."""
    allowance = tolerance.allowance(was.median)
    above, below = now.median - was.high - allowance, was.low - allowance - now.median
    bad, good = (below, above) if tolerance.direction == "higher" else (above, below)
    if tolerance.direction == "both":
        bad, good = max(above, below), -1
    verdict = Verdict.REGRESSED if bad > 0 else Verdict.IMPROVED if good > 0 else Verdict.SAME
    return Line(
        verdict,
        name,
        metric.title,
        metric=metric,
        was=was.median,
        now=now.median,
        allowed=now.median - above if bad == above else now.median + below,
        excess=bad / max(was.median, 1),
        phases=phases,
    )


def _growth(metric: Metric, was: Series, now: Series) -> tuple[Growth, ...]:
    """Return how the figure that explains a metric changed, phase by phase, in their order."""
    key = metric.in_phase
    highest = max((figures.get(key, 0) for figures in was.phases.values()), default=0)
    found = []
    for phase, figures in now.phases.items():
        if (value := figures.get(key)) is not None:
            before = was.phases.get(phase, {}).get(key)
            base = before if before is not None else highest if metric.unit == "bytes" else 0
            found.append(Growth(phase, before, value, value - base))
    return tuple(found)


def _budget(budget: Budget, series: Mapping[str, Series]) -> Iterator[Line]:
    """Judge one budget; one that no figure was compared with is missing, not kept."""
    compared = False
    for name, one in series.items():
        figure, bound = one.figures.get(budget.metric.name), budget.bound(one)
        if not budget.covers(name) or figure is None or bound is None:
            continue
        compared = True
        kept = budget.is_kept(figure.high, bound)
        yield Line(
            Verdict.SAME if kept else Verdict.OVER_BUDGET,
            name,
            str(budget),
            metric=budget.metric,
            was=bound,
            now=figure.high,
            allowed=bound,
            excess=(figure.high - bound) / max(bound, 1),
        )
    if not compared:
        text = f"{budget}: nothing that was measured has such a figure"
        yield Line(Verdict.MISSING, "budget", str(budget), text)


def _noisy(baseline: Baseline, rules: Rules) -> list[str]:
    """Name the bands of the baseline that hide more than a tolerance would."""
    found = []
    for name, one in baseline.series.items():
        for metric_name, figure in one.figures.items():
            tolerance = rules.tolerances.get(metric_name)
            if tolerance and figure.high - figure.median > 2 * tolerance.allowance(figure.median):
                metric = METRICS[metric_name]
                found.append(
                    f"the baseline's repeats of {name} spread from {metric.text(figure.low)} to"
                    f" {metric.text(figure.high)} in {metric.title}: smaller regressions are not seen"
                )
    return found
