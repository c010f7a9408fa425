"""Compare all figures with the baseline file and the budgets; sort the verdicts, the worst first."""

from collections.abc import Iterable, Iterator, Mapping

from weighin.errors import ConfigError
from weighin.gate.baseline import Baseline, Rules
from weighin.gate.budgets import Budget
from weighin.gate.lines import GateResult, Growth, Line, LineVerdict
from weighin.gate.outcomes import Outcomes
from weighin.records.machine import CONCURRENT, Difference, Setting, differences, spoils_times
from weighin.records.metrics import METRICS, Metric, Tolerance
from weighin.records.series import STRATEGY, Figure, Series
from weighin.uses import is_of_use

_ORDER = tuple(LineVerdict)


def evaluate(
    baseline: Baseline | None,
    rules: Rules,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
) -> GateResult:
    """Judge all measurements against the budgets, and against ``baseline`` if it is not None."""
    outcomes = Outcomes(
        baseline.series if baseline else None, series, rules.budgets, rules.expected
    )
    lines = list(outcomes.lines())
    notes = list(outcomes.notes())
    if baseline:
        changes = differences(baseline.environment, environment, rules.policies)
        lines += _settings(changes)
        tolerances = rules.tolerances
        concurrent = CONCURRENT in environment or CONCURRENT in baseline.environment
        if concurrent or spoils_times(changes):
            tolerances = {n: t for n, t in tolerances.items() if METRICS[n].unit != "ns"}
            if len(tolerances) < len(rules.tolerances):
                notes.append(
                    "times are not judged: several cells ran at once (--jobs)"
                    if concurrent
                    else "times are not judged: the baseline was measured on another machine or with other settings"
                )
        for name, was in baseline.series.items():
            lines += _figures(name, was, series[name], tolerances) if name in series else []
    for budget in rules.budgets:
        if CONCURRENT in environment and budget.metric.unit == "ns":
            raise ConfigError(
                f"the budget {str(budget)!r} limits a time, but times are not comparable: several cells ran at once (--jobs)",
                "measure without --jobs, or leave the budget out",
            )
        lines += _budget(budget, series)
        notes += _without_figure(budget, series)
    if baseline and not baseline.series.keys() & series.keys():
        first, other = next(iter(baseline.series), "nothing"), next(iter(series), "nothing")
        notes.append(
            f"the baseline and the run have no series in common: for example, the baseline has {first},"
            f" and the run has {other}"
        )
    notes += _noisy(baseline, rules) if baseline else []
    ordered = sorted(lines, key=lambda line: (_ORDER.index(line.verdict), -line.excess))
    return GateResult(tuple(ordered), tuple(notes))


def _settings(changes: Iterable[Difference]) -> Iterator[Line]:
    for change in changes:
        verdict = LineVerdict.DIFFERS if change.policy == "fail" else LineVerdict.CHANGED
        yield Line(verdict, "environment", change.name, str(change))


def _figures(
    name: str, was: Series, now: Series, tolerances: Mapping[str, Tolerance]
) -> Iterator[Line]:
    if was.model_bytes and now.model_bytes and was.model_bytes != now.model_bytes:
        text = f"the model's size differs: {was.model_bytes:,} bytes -> {now.model_bytes:,} bytes"
        yield Line(LineVerdict.DIFFERS, name, "model", text)
        return
    if not (was.is_ok and now.is_ok):
        return  # a load that was cut off may need more memory than its peak
    for metric_name, tolerance in tolerances.items():
        metric = METRICS[metric_name]
        before, after = was.figures.get(metric_name), now.figures.get(metric_name)
        if before and after:
            phases = _growth(metric, was, now)
            yield judge_figure(name, metric, tolerance, before, after, phases)
        elif before:
            yield Line(LineVerdict.MISSING, name, metric.title, f"{metric.title} was not measured")


def judge_figure(
    name: str,
    metric: Metric,
    tolerance: Tolerance,
    was: Figure,
    now: Figure,
    phases: tuple[Growth, ...],
) -> Line:
    """Judge the median of ``now``, which may lie beyond the range of ``was`` by at most the tolerance."""
    allowance = tolerance.allowance(was.median)
    above, below = now.median - was.high - allowance, was.low - allowance - now.median
    bad, good = (below, above) if tolerance.direction == "higher" else (above, below)
    if tolerance.direction == "both":
        bad, good = max(above, below), -1
    verdict = (
        LineVerdict.REGRESSED if bad > 0 else LineVerdict.IMPROVED if good > 0 else LineVerdict.SAME
    )
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
    """Return how much each phase of ``now`` changed, in the phase figure ``metric.in_phase``."""
    earlier, later = _by_phase(metric, was), _by_phase(metric, now)
    highest = max(earlier.values(), default=0) if metric.unit == "bytes" else 0
    return tuple(
        Growth(phase, earlier.get(phase), value, value - earlier.get(phase, highest))
        for phase, value in later.items()
    )


def _by_phase(metric: Metric, series: Series) -> dict[str, int]:
    """Return each phase's figure; of ``above_import``, what its peak RSS has above the imports'."""
    key = metric.in_phase
    found = {name: figures[key] for name, figures in series.phases.items() if key in figures}
    of_load = [value for name, value in found.items() if not is_of_use(name)]
    if metric.name == "above_import" and of_load:
        imports_bytes = max(of_load) - series.figures[metric.name].median
        return {name: max(value - imports_bytes, 0) for name, value in found.items()}
    return found


def _budget(budget: Budget, series: Mapping[str, Series]) -> Iterator[Line]:
    """Yield a line for each measurement that the budget covers and that has the budget's figure.

    The verdict is "missing" if no measurement has it, or if a search found no RAM floor.
    """
    compared = False
    for name, one in series.items():
        figure, bound = one.figures.get(budget.metric.name), budget.bound(one)
        if not budget.covers(name):
            continue
        if budget.metric.name == "floor" and one.is_ok and one.no_floor:
            compared = True
            yield Line(
                LineVerdict.MISSING, name, str(budget), f"no floor was found: {one.no_floor}"
            )
            continue
        if figure is None or bound is None:
            continue
        compared = True
        kept = budget.is_kept(figure.high, bound)
        yield Line(
            LineVerdict.SAME if kept else LineVerdict.OVER_BUDGET,
            name,
            str(budget),
            metric=budget.metric,
            was=bound,
            now=figure.high,
            allowed=bound,
            excess=(figure.high - bound) / max(bound, 1),
        )
    if not compared:
        yield Line(
            LineVerdict.MISSING, "budget", str(budget), f"{budget}: {_unjudged(budget, series)}"
        )


def _unjudged(budget: Budget, series: Mapping[str, Series]) -> str:
    """Return the reason why no measurement could be compared with a budget."""
    if not series or any(map(budget.covers, series)):
        return "no measured series has this figure"
    strategies = dict.fromkeys(name.split(" ")[STRATEGY] for name in series if " " in name)
    known = f"; the run's strategies are {', '.join(strategies)}" if strategies else ""
    return f"no series matches {budget.pattern!r}{known}"


def _without_figure(budget: Budget, series: Mapping[str, Series]) -> list[str]:
    """Return a note on the ok measurements under ``budget`` that lack its figure, unless all lack it."""
    names = [name for name in series if budget.covers(name) and series[name].is_ok]
    lacking = [
        name
        for name in names
        if budget.metric.name not in series[name].figures or budget.bound(series[name]) is None
    ]
    if not lacking or len(lacking) == len(names):
        return []
    return [f"{budget}: not judged, because there is no such figure, for {', '.join(lacking)}"]


def _noisy(baseline: Baseline, rules: Rules) -> list[str]:
    """Return a note for each figure in the baseline file whose repeats vary much.

    Their largest value then exceeds their median by more than twice the tolerance.
    """
    notes = []
    for name, series in baseline.series.items():
        for metric_name, figure in series.figures.items():
            tolerance = rules.tolerances.get(metric_name)
            if tolerance and figure.high - figure.median > 2 * tolerance.allowance(figure.median):
                metric = METRICS[metric_name]
                notes.append(
                    f"the baseline's repeats of {name} spread from {metric.text(figure.low)} to"
                    f" {metric.text(figure.high)} in {metric.title}: smaller regressions are not detected"
                )
    return notes
