"""Judge what runs measured: by a baseline file, by budgets and by expected outcomes (``weighin check``).

Everything that is judged is a ``Line``: an outcome, a figure, a budget or a setting, with its verdict.
A figure regresses if the median of the repeats exceeds the range of the baseline's repeats by more
than the metric's tolerance. An outcome other than ok fails, unless the baseline has it, too, or a
rule expects it. Wrong weights and failed strategies always fail.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from weighin.cell import is_of_use
from weighin.errors import ConfigError, HarnessError, RecordError
from weighin.gate import baseline as files
from weighin.gate.baseline import Baseline
from weighin.gate.rules import EXPECTABLE, Budget, Expectation, Rules
from weighin.records import run_folder
from weighin.records.machine import CONCURRENT, Setting, differences, settings_of
from weighin.records.metrics import METRICS, Metric, Tolerance
from weighin.records.run_folder import Coverage, Records
from weighin.records.series import STRATEGY, Figure, Series, name_of, selects, summarise
from weighin.result import BROKEN, Outcome
from weighin.text import few


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
# Times are not compared if one of these settings differs.
TIMING: Final = (
    "machine", "cpu", "cpus", "threads", "gpu", "kernel", "torch", "settings.*", CONCURRENT,
)  # fmt: skip
_ORDER: Final = tuple(LineVerdict)
FAILING: Final = _ORDER[: _ORDER.index(LineVerdict.CHANGED)]


@dataclass(frozen=True, slots=True)
class Growth:
    """A phase's figure before (``was``, None if the baseline file lacks the phase) and ``now``.

    ``step`` is the growth over ``was``, else over the highest phase of the baseline file.
    """

    phase: str
    was: int | None
    now: int
    step: int


@dataclass(frozen=True, slots=True)
class Line:
    verdict: LineVerdict
    series: str  # its name, or "environment", "budget" or "run"
    what: str  # the metric, budget or setting, or "outcome", "model" or "cells"
    text: str = ""  # the description of an item without figures
    metric: Metric | None = None  # of the following figures
    was: int = 0  # in the baseline file, or the bound of a budget
    now: int = 0
    allowed: int = 0  # the worst figure that passes
    # How much worse ``now`` is than ``allowed``, as a share of ``was``; at most 0 for a pass.
    excess: float = math.inf
    phases: tuple[Growth, ...] = ()

    @property
    def fails(self) -> bool:
        return self.verdict in FAILING

    @property
    def is_budget(self) -> bool:
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
        step = self.now - self.was
        if step <= 0 or not self.phases:
            return None
        if self.metric and self.metric.unit == "bytes":
            for phase in self.phases:
                if 0.5 * step <= phase.step <= 1.5 * step:
                    return phase
        largest = max(self.phases, key=lambda phase: phase.step)
        return largest if largest.step > 0 else None


@dataclass(frozen=True, slots=True)
class GateResult:
    """All lines, the worst first, and notes."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.fails)


@dataclass(frozen=True)
class Group:
    """Results that are judged together; repeats of a series in several runs are one series."""

    name: str
    runs: Sequence[Records]
    incomplete: Mapping[Path, Coverage] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        return [*dict.fromkeys(text for run in self.runs for text in run.warnings)]

    @property
    def environments(self) -> list[dict[str, Any]]:
        return [one.environment for run in self.runs for one in run.results if one.environment]

    @property
    def started_at(self) -> str:
        times = (one.started_at for run in self.runs for one in run.results if one.started_at)
        return min(times, default="")

    @cached_property
    def environment(self) -> dict[str, Setting]:
        return settings_of(self.environments)

    @cached_property
    def series(self) -> dict[str, Series]:
        return summarise(self.runs)


def read_runs(folders: Sequence[Path]) -> Group:
    """Return the results of all runs together; raise RecordError if a run has no record, or a damaged one."""
    runs = {folder: run_folder.read(folder) for folder in folders}
    for folder, records in runs.items():
        if not records.results:
            again = f"measure first: {records.coverage.again}" if records.coverage else ""
            raise RecordError(f"{folder} contains no record: nothing was measured", again)
    missing = {folder: run.coverage for folder, run in runs.items() if run.missing and run.coverage}
    return Group(", ".join(map(str, folders)), [runs[folder] for folder in folders], missing)


def check(
    measured: Group,
    baseline_file: Path | None,
    *,
    metrics: Sequence[str] = (),
    partial: bool = False,
    **typed: Iterable[str],
) -> GateResult:
    """Judge runs by a baseline file and by rules; ``typed`` adds those of the command line (``Rules.typed``).

    If there are ``metrics``, only these are compared with the baseline file. A run in which planned cells
    have no record fails, unless only its measured part is judged (``partial``).
    """
    baseline = files.read(baseline_file) if baseline_file else None
    if baseline is None and not typed.get("budgets"):
        raise ConfigError(
            "check has neither a baseline file nor a budget to compare the run with",
            'give a baseline file, a budget or both: --baseline FILE, --budget "peak_rss <= 8GiB"',
        )
    rules = (baseline.rules if baseline else Rules()).typed(**typed).only(metrics)
    if partial:  # what concerns only planned cells that have no record is left out
        planned = {name_of(cell) for one in measured.incomplete.values() for cell in one.pending}
        left = planned - measured.series.keys()

        def covers(budget: Budget, names: Iterable[str]) -> bool:
            return any(selects(budget.selector, name) for name in names)

        kept = [b for b in rules.budgets if covers(b, measured.series) or not covers(b, left)]
        rules = replace(rules, budgets=tuple(kept))
        if baseline:
            series = {name: one for name, one in baseline.series.items() if name not in left}
            baseline = replace(baseline, series=series)
    result = evaluate(baseline, rules, measured.environment, measured.series)
    missing = {f"{run}: {covered}": covered.again for run, covered in measured.incomplete.items()}
    if partial:
        return replace(result, notes=(*result.notes, *missing))
    lines = []
    for text, again in missing.items():
        repair = f"{again} measures the rest, --partial judges only this part"
        lines.append(Line(LineVerdict.MISSING, "run", "cells", f"{text}; {repair}"))
    return replace(result, lines=(*lines, *result.lines))


def update(
    measured: Group, baseline_file: Path, *, partial: bool = False, **typed: Iterable[str]
) -> list[str]:
    """Write what was measured, and the rules ``typed`` compare, into the baseline file; return the diff."""
    for run, covered in {} if partial else measured.incomplete.items():
        raise HarnessError(
            f"cannot make a baseline from an incomplete run: {run}: {covered}",
            f"measure the missing cells: {covered.again}; or make a baseline of the measured cells alone:"
            " add --partial",
            exit_code=1,
        )
    ended = {f"{name}: {one.outcome}": one.failures for name, one in measured.series.items()}
    unmeasured = [text for text, ends in ended.items() if Outcome.MEASUREMENT_FAILED in ends]
    broken = [text for text, ends in ended.items() if ends & {*BROKEN}]
    ours = measured.environment.items()
    mixed = [
        f"the cells differ in {name}: {one}"
        for name, one in ours
        if " | " in str(one) and not name.startswith("releases.")  # those of --with
    ]
    for found, repair, code in (
        (unmeasured, "measure the run again: a baseline without a figure accepts any value of it", 2),
        (broken, "repair these strategies and measure again, or leave them out of --strategies", 1),
        (mixed, "measure all cells again on one machine, with the same packages and variables", 2),
    ):  # fmt: skip
        if found:
            raise HarnessError(f"cannot make a baseline: {few(found)}", repair, exit_code=code)
    return files.write(baseline_file, measured.environment, measured.series, **typed)


def evaluate(
    baseline: Baseline | None,
    rules: Rules,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
) -> GateResult:
    """Judge all series by the rules and by the baseline file, if any."""
    before = baseline.series if baseline else {}
    lines, notes, unjudged, unmet = list[Line](), list[str](), list[str](), list[Expectation]()
    for rule in rules.expected:
        ends = [one.failures for name, one in series.items() if selects(rule.selector, name)]
        if not ends:
            notes.append(f"the expected outcome {rule} matches no measured series")
        if not any(rule.outcome in failures for failures in ends):
            unmet.append(rule)
    for name in dict.fromkeys([*before, *series]):
        was, now = before.get(name), series.get(name)
        line = _outcome(name, was, now, rules, unmet, is_new=bool(baseline) and not was)
        if line:
            lines.append(line)
        elif now and not now.is_ok:
            unjudged.append(f"{name} ({now.outcome})")
    if unjudged:
        notes.append(f"these failures are not judged, because no budget covers them: {', '.join(unjudged)}")  # fmt: skip
    if baseline:
        lines += _beside(baseline, rules, environment, series, notes)
    for budget in rules.budgets:
        if CONCURRENT in environment and budget.metric.unit == "ns":
            raise ConfigError(
                f"the budget {str(budget)!r} limits a time, but times are not comparable: several cells ran at once (jobs)",
                "measure without --set jobs, or remove the budget",
            )
        lines += _budget(budget, series, notes)
    ordered = sorted(lines, key=lambda line: (_ORDER.index(line.verdict), -line.excess))
    return GateResult(tuple(ordered), tuple(notes))


def _outcome(
    name: str,
    was: Series | None,
    now: Series | None,
    rules: Rules,
    unmet: Sequence[Expectation],
    *,
    is_new: bool,
) -> Line | None:
    """Return the line for the outcome of a series; None if nothing judges it.

    Without a baseline file, these are judged: the failed series with a budget or an expected outcome,
    the broken ones, and an ok one whose failure was expected (in ``unmet``).
    """
    if now is None:
        text = f"was not measured; {was.outcome if was else ''} in the baseline"
        return Line(LineVerdict.MISSING, name, "outcome", text)
    expected = [each for each in rules.expected if selects(each.selector, name)]
    if now.is_ok:
        lost = next((each for each in expected if each in unmet), None)
        before = f"{lost.outcome} expected" if lost else ""
        before = was.outcome if was and not was.is_ok else before
        if before:
            repair = f"; {str(lost)!r} no longer needs to be expected" if lost else ""
            return Line(LineVerdict.IMPROVED, name, "outcome", f"{before} -> ok{repair}")
        if was:
            return Line(LineVerdict.SAME, name, "outcome", "ok", excess=-math.inf)
        return Line(LineVerdict.NEW, name, "outcome", "not in the baseline; ok") if is_new else None

    accepted = {each.outcome.value for each in expected}
    accepted |= was.failures & {*EXPECTABLE} if was else set()
    is_covered = any(selects(budget.selector, name) for budget in rules.budgets)
    is_judged = bool(was or is_new or is_covered or now.failures & {*BROKEN})
    verdict, text = LineVerdict.EXPECTED, now.outcome
    if not now.failures <= accepted:
        verdict = LineVerdict.REGRESSED if was and was.is_ok else LineVerdict.NOT_OK
        if was and was.outcome != now.outcome:
            text = f"{was.outcome} -> {text}"
        text += ", and not in the baseline" * is_new + (f": {now.message}" if now.message else "")
    is_expected = verdict is LineVerdict.EXPECTED
    return Line(verdict, name, "outcome", text) if is_expected or is_judged else None


def _beside(
    baseline: Baseline,
    rules: Rules,
    environment: Mapping[str, Setting],
    series: Mapping[str, Series],
    notes: list[str],
) -> Iterator[Line]:
    """Yield a line for each setting and figure that the baseline has; add what is not judged to ``notes``."""
    changes = differences(baseline.environment, environment, rules.policies)
    for change in changes:
        verdict = LineVerdict.DIFFERS if change.policy == "fail" else LineVerdict.CHANGED
        yield Line(verdict, "environment", change.name, str(change))
    tolerances = rules.tolerances
    concurrent = CONCURRENT in environment or CONCURRENT in baseline.environment
    if concurrent or any(fnmatchcase(one.name, pattern) for one in changes for pattern in TIMING):
        tolerances = {n: t for n, t in tolerances.items() if METRICS[n].unit != "ns"}
        why = "the baseline was measured on another machine or with other settings"
        why = "several cells ran at once (jobs)" if concurrent else why
        notes += [f"times are not judged: {why}"] if len(tolerances) < len(rules.tolerances) else []
    for name, was in baseline.series.items():
        if name in series:
            yield from _figures(name, was, series[name], tolerances)
    if not baseline.series.keys() & series.keys():
        first, other = next(iter(baseline.series), "nothing"), next(iter(series), "nothing")
        notes.append(
            f"the baseline and the run have no series in common: for example, the baseline has {first},"
            f" and the run has {other}"
        )


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
            earlier, later = _by_phase(metric, was), _by_phase(metric, now)
            highest = max(earlier.values(), default=0) if metric.unit == "bytes" else 0
            phases = tuple(
                Growth(phase, earlier.get(phase), value, value - earlier.get(phase, highest))
                for phase, value in later.items()
            )
            yield judge_figure(name, metric, tolerance, before, after, phases)
        elif before:
            yield Line(LineVerdict.MISSING, name, metric.title, f"{metric.title} was not measured")


def judge_figure(
    name: str,
    metric: Metric,
    tolerance: Tolerance,
    was: Figure,
    now: Figure,
    phases: tuple[Growth, ...] = (),
) -> Line:
    """Judge the median of ``now``, which may lie beyond the range of ``was`` by at most the tolerance."""
    allowance = tolerance.allowance(was.median)
    above, below = now.median - was.high - allowance, was.low - allowance - now.median
    bad, good = (below, above) if tolerance.direction == "higher" else (above, below)
    if tolerance.direction == "both":
        bad, good = max(above, below), -1
    worse, better = LineVerdict.REGRESSED, LineVerdict.IMPROVED
    verdict = worse if bad > 0 else better if good > 0 else LineVerdict.SAME
    allowed = now.median - above if bad == above else now.median + below
    return Line(
        verdict, name, metric.title, metric=metric, was=was.median, now=now.median, allowed=allowed,
        excess=bad / max(was.median, 1), phases=phases,
    )  # fmt: skip


def _by_phase(metric: Metric, series: Series) -> dict[str, int]:
    """Return each phase's figure; of ``above_import``, what its peak RSS has above the imports'."""
    key = metric.in_phase
    found = {name: figures[key] for name, figures in series.phases.items() if key in figures}
    of_load = [value for name, value in found.items() if not is_of_use(name)]
    if metric.name == "above_import" and of_load:
        imports_bytes = max(of_load) - series.figures[metric.name].median
        return {name: max(value - imports_bytes, 0) for name, value in found.items()}
    return found


def _budget(budget: Budget, series: Mapping[str, Series], notes: list[str]) -> list[Line]:
    """Return a line for each series that the budget covers; add those without its figure to ``notes``."""
    lines, lacking, metric, what = [], [], budget.metric, str(budget)
    covered = {name: one for name, one in series.items() if selects(budget.selector, name)}
    for name, one in covered.items():
        figure, bound = one.figures.get(metric.name), budget.bound(one)
        # One of several runs may have found no floor.
        if metric.name == "floor" and one.is_ok and one.no_floor:
            text = f"no floor was found: {one.no_floor}"
            lines.append(Line(LineVerdict.MISSING, name, what, text))
        elif figure is not None and bound is not None:
            now, excess = figure.high, (figure.high - bound) / max(bound, 1)
            kept = LineVerdict.SAME if budget.is_kept(now, bound) else LineVerdict.OVER_BUDGET
            lines.append(Line(kept, name, what, "", metric, bound, now, bound, excess))
        elif one.is_ok:
            lacking.append(name)
    if lacking and lacking != [name for name, one in covered.items() if one.is_ok]:
        notes.append(
            f"{what}: not judged, because there is no such figure, for {', '.join(lacking)}"
        )
    if lines:
        return lines
    why = "no measured series has this figure"
    if series and not covered:
        strategies = dict.fromkeys(name.split(" ")[STRATEGY] for name in series if " " in name)
        known = f"; the run's strategies are {', '.join(strategies)}" if strategies else ""
        why = f"no series matches {budget.selector!r}{known}"
    return [Line(LineVerdict.MISSING, "budget", what, f"{what}: {why}")]
