"""Check one or more runs against a baseline file and budgets (``weighin check``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from weighin.errors import ConfigError, NoBaseline, RecordError
from weighin.exit_codes import BROKEN
from weighin.gate import baseline as baselines
from weighin.gate import budgets, freeze
from weighin.gate.baseline import Baseline, Rules
from weighin.gate.evaluate import evaluate
from weighin.gate.expected import Expectation, is_expected, parse, suggest
from weighin.gate.lines import GateResult, Line, LineVerdict
from weighin.gate.tables import short_names
from weighin.records import run_folder
from weighin.records.coverage import Coverage
from weighin.records.machine import Setting, fingerprint, settings_of
from weighin.records.metrics import named
from weighin.records.repeats import grouped
from weighin.records.series import Series, SeriesRun, name_of, summarise
from weighin.result import Outcome


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """The series of one or more runs; a series has its repeats from all of these runs.

    ``machines`` are the fingerprints of the kinds of machine that measured, and ``nodes`` the names
    of a fleet's machines. ``incomplete`` maps each run that lacks records of planned cells to the part
    of its plan that was measured.
    """

    environment: dict[str, Setting]
    series: dict[str, Series]
    warnings: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    incomplete: Mapping[Path, Coverage] = field(default_factory=dict)


def read_runs(folders: Sequence[Path]) -> MeasuredRuns:
    """Return the series of all runs; a series has its repeats from all of these runs.

    Raises:
        RecordError: a folder is not a run, or contains no record.
    """
    warnings, runs, incomplete = _read(folders)
    return replace(_measured(runs, warnings), incomplete=incomplete)


def read_machines(folders: Sequence[Path]) -> dict[str, MeasuredRuns]:
    """Return the series of all runs for each kind of machine, by its fingerprint.

    Cells that were skipped belong to no machine. Raises errors as ``read_runs`` does.
    """
    warnings, runs, _ = _read(folders)
    machines: dict[str, list[SeriesRun]] = {}
    for run in runs:
        measured = [result for result in run.results if result.environment]
        for machine, results in grouped(measured, lambda one: fingerprint(one.environment)).items():
            machines.setdefault(machine, []).append(replace(run, results=results))
    return {machine: _measured(ours, warnings) for machine, ours in machines.items()}


def _read(
    folders: Sequence[Path],
) -> tuple[tuple[str, ...], list[SeriesRun], dict[Path, Coverage]]:
    warnings: list[str] = []
    runs: list[SeriesRun] = []
    incomplete: dict[Path, Coverage] = {}
    for folder in folders:
        records = run_folder.read(folder)
        if not records.results:
            raise RecordError(
                f"{folder} contains no record: nothing was measured",
                f"measure first: {records.coverage.again}" if records.coverage else "",
            )
        warnings += records.warnings
        if records.missing and records.coverage:
            incomplete[folder] = records.coverage
        is_search = records.coverage is not None and records.coverage.is_search
        runs.append(SeriesRun(records.results, is_search))
    return tuple(warnings), runs, incomplete


def _measured(runs: Sequence[SeriesRun], warnings: tuple[str, ...]) -> MeasuredRuns:
    measured = [result for run in runs for result in run.results if result.environment]
    nodes = {str(result.environment.get("node", {}).get("name", "")) for result in measured}
    return MeasuredRuns(
        environment=settings_of(result.environment for result in measured),
        series=summarise(runs),
        warnings=warnings,
        machines=tuple(dict.fromkeys(fingerprint(one.environment) for one in measured)),
        nodes=tuple(sorted(nodes - {""})),
    )


def check(
    measured: MeasuredRuns,
    baseline_file: Path | None,
    *,
    extra_budgets: Sequence[str] = (),
    metrics: Sequence[str] = (),
    expected: Sequence[str] = (),
    partial: bool = False,
) -> GateResult:
    """Judge runs against a baseline file and budgets.

    Args:
        metrics: the metrics to compare with the baseline file; all metrics if empty.
        expected: expected outcomes, in addition to the expected outcomes in the baseline file.
        partial: judge the measured cells of a run that is not complete, which otherwise fails.

    Raises:
        ConfigError: there is neither a baseline file nor a budget, or an input is invalid.
    """
    if baseline_file is None and not extra_budgets:
        raise ConfigError(
            "check has neither a baseline file nor a budget to compare the run with",
            'give one of them: --baseline FILE, or --budget "peak_rss <= 8GiB"',
        )
    baseline = baselines.read(baseline_file) if baseline_file else None
    rules = baseline.rules if baseline else baselines.default_rules()
    if metrics:
        chosen = [named(name).name for name in metrics]
        judged = baselines.default_rules().tolerances | rules.tolerances
        rules = replace(rules, tolerances={name: judged[name] for name in chosen})
    added = tuple(budgets.parse(text) for text in extra_budgets)
    typed = _parsed(expected)
    rules = replace(rules, budgets=(*rules.budgets, *added), expected=(*rules.expected, *typed))
    if partial:
        baseline, rules = narrowed(baseline, rules, measured)
    result = evaluate(baseline, rules, measured.environment, measured.series)
    if partial:
        parts = (f"{run}: {covered}" for run, covered in measured.incomplete.items())
        return replace(result, notes=(*result.notes, *parts))
    missing = (
        f"{run}: {covered}; {covered.again} measures the rest, --partial judges only this part"
        for run, covered in measured.incomplete.items()
    )
    failing = (Line(LineVerdict.MISSING, "run", "cells", text) for text in missing)
    return replace(result, lines=(*failing, *result.lines))


def narrowed(
    baseline: Baseline | None, rules: Rules, measured: MeasuredRuns
) -> tuple[Baseline | None, Rules]:
    """Leave out the series that were planned but not measured, and the budgets on them alone."""
    planned = {
        name_of(cell) for covered in measured.incomplete.values() for cell in covered.pending
    }
    left = planned - measured.series.keys()
    kept = tuple(
        budget
        for budget in rules.budgets
        if any(map(budget.covers, measured.series)) or not any(map(budget.covers, left))
    )
    if baseline:
        series = {name: one for name, one in baseline.series.items() if name not in left}
        baseline = replace(baseline, series=series)
    return baseline, replace(rules, budgets=kept)


def update(
    measured: MeasuredRuns,
    baseline_file: Path,
    *,
    expected: Sequence[str] = (),
    partial: bool = False,
    accept: Callable[[Sequence[str]], bool],
) -> list[str]:
    """Write the measured figures into the baseline file, and return the lines of the diff.

    ``expected`` outcomes are added to the file. ``accept`` gets one line for each series that is
    not ok and whose outcome is not expected, and returns whether to expect these outcomes from now
    on. ``partial`` writes a baseline of a run that is not complete.

    Raises:
        ConfigError: some cell could not be measured, or the file is invalid or not writable.
        NoBaseline: a run is not complete, a strategy loaded wrong weights or failed, or an outcome was
            not accepted.
    """
    if measured.incomplete and not partial:
        run, covered = next(iter(measured.incomplete.items()))
        raise NoBaseline(
            f"cannot make a baseline from a run of which cells are missing: {run}: {covered}",
            f"measure the missing cells: {covered.again}; or add --partial to use the measured"
            " cells alone",
        )
    _refuse(measured)
    typed = _parsed(expected)
    present = baselines.read(baseline_file).rules.expected if baseline_file.exists() else ()
    wanted = [*typed, *_accepted(measured, [*present, *typed], baseline_file, accept)]
    return freeze.update(baseline_file, measured.environment, measured.series, wanted)


def _refuse(measured: MeasuredRuns) -> None:
    for name, series in measured.series.items():
        if Outcome.MEASUREMENT_FAILED in series.outcome:
            raise ConfigError(
                f"{name} could not be measured: {series.message or series.outcome}",
                "measure the cell again first: a baseline without its figures would accept any figure",
            )
    if broken := [name for name, series in measured.series.items() if series.failures & {*BROKEN}]:
        raise NoBaseline(
            f"cannot make a baseline of failed strategies: {'; '.join(_described(measured, broken))}",
            "repair these strategies and measure again, or leave them out of --strategies",
        )
    if mixed := [name for name, value in measured.environment.items() if " | " in str(value)]:
        shown = "; ".join(f"{name}: {measured.environment[name]}" for name in mixed[:3])
        raise ConfigError(
            f"the cells were measured under different settings ({shown})",
            "measure all cells again on one machine, with the same packages and variables",
        )


def _accepted(
    measured: MeasuredRuns,
    known: Sequence[Expectation],
    baseline_file: Path,
    accept: Callable[[Sequence[str]], bool],
) -> list[Expectation]:
    """Return the expectations that the series need beside ``known``, if the user accepts them."""
    series = measured.series
    failed = [name for name in series if not is_expected(name, series[name], known)]
    if not failed:
        return []
    wanted = suggest(failed, series)
    mixed = [name for name in failed if not is_expected(name, series[name], wanted)]
    if mixed:
        raise NoBaseline(
            f"more than one outcome that is not ok: {'; '.join(_described(measured, mixed))}",
            "a baseline file has one outcome for each series: measure these series again, or leave"
            " their strategies out",
        )
    lines = _described(measured, failed)
    if not accept(lines):
        again = f"weighin check RUN --baseline {quote(str(baseline_file))} --update"
        raise NoBaseline(
            f"not ok, and not expected: {'; '.join(lines)}",
            f"if these outcomes are intended: {again} --expect-failures",
        )
    return wanted


def _described(measured: MeasuredRuns, names: Sequence[str]) -> list[str]:
    short, _ = short_names(names)
    return [f"{short[name]}: {measured.series[name].outcome}" for name in names]


def _parsed(expected: Sequence[str]) -> tuple[Expectation, ...]:
    return tuple(expectation for text in expected for expectation in parse(text))
