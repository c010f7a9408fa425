"""Check one or more runs against a baseline file and budgets (``weighin check``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from weighin.errors import ConfigError, HarnessError, RecordError
from weighin.gate import baseline as baselines
from weighin.gate import budgets, freeze
from weighin.gate.baseline import Baseline, Rules
from weighin.gate.evaluate import evaluate
from weighin.gate.expected import Expectation, is_expected, parse, suggest
from weighin.gate.lines import GateResult, Line, LineVerdict
from weighin.gate.tables import short_names
from weighin.records import run_folder
from weighin.records.machine import Setting, fingerprint, settings_of
from weighin.records.metrics import grouped, named
from weighin.records.run_folder import Coverage
from weighin.records.series import Series, SeriesRun, name_of, summarise
from weighin.result import BROKEN, Outcome


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """The figures of one or more runs; repeats of a measurement in different runs count together.

    Attributes:
        environment: the machine and software of the runs. A setting that differs between cells has
            all of its values, separated by " | ".
        series: the summarised repeats of each measurement, by the name of the measurement.
        machines: a fingerprint (hash) for each kind of machine that measured cells of the runs.
        nodes: the names of the machines, if a cluster measured the runs.
        incomplete: for each run that lacks records of planned cells, which cells are missing.
    """

    environment: dict[str, Setting]
    series: dict[str, Series]
    warnings: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    incomplete: Mapping[Path, Coverage] = field(default_factory=dict)


def read_runs(folders: Sequence[Path]) -> MeasuredRuns:
    """Return the figures of all runs together.

    Raises:
        RecordError: a folder is not a run, has no record, or has a damaged record.
    """
    warnings, runs, incomplete = _read(folders)
    return replace(_measured(runs, warnings), incomplete=incomplete)


def read_machines(folders: Sequence[Path]) -> dict[str, MeasuredRuns]:
    """Return the figures of each kind of machine over all runs, by the kind's fingerprint (hash).

    Records without a machine, as of skipped measurements, are left out.

    Raises:
        RecordError: a folder is not a run, has no record, or has a damaged record.
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
        extra_budgets: budgets in addition to those in the baseline file.
        metrics: the metrics to compare with the baseline file. If it is empty, all metrics are
            compared that the file does not turn off.
        expected: expected outcomes in addition to those in the baseline file.
        partial: judge only the measured part of an incomplete run. Without ``partial``, a run fails
            the check if planned cells have no record.

    Raises:
        ConfigError: there is neither a baseline file nor a budget, or an input is invalid.
    """
    if baseline_file is None and not extra_budgets:
        raise ConfigError(
            "check has neither a baseline file nor a budget to compare the run with",
            'give a baseline file, a budget or both: --baseline FILE, --budget "peak_rss <= 8GiB"',
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
    """Return ``baseline`` and ``rules`` without what concerns only planned cells that have no record."""
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

    Args:
        expected: expected outcomes to write, beside those in the file.
        partial: also write the figures of a run that lacks records of planned cells.
        accept: a function that gets a line of text for each measurement with an unexpected failure,
            and returns whether to write these failures as expected outcomes.

    Raises:
        ConfigError: a cell could not be measured, settings differ between cells, or the file is
            invalid or not writable.
        HarnessError: with exit code 1, if a run is incomplete (without ``partial``), weights were
            wrong, a strategy, command or use failed, repeats failed in different ways, or ``accept``
            returned False.
    """
    if measured.incomplete and not partial:
        run, covered = next(iter(measured.incomplete.items()))
        raise HarnessError(
            f"cannot make a baseline from an incomplete run: {run}: {covered}",
            f"measure the missing cells: {covered.again}; or make a baseline of the measured cells alone:"
            " add --partial",
            exit_code=1,
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
                "measure the run again: a baseline without a figure would accept any value of it",
            )
    if broken := [name for name, series in measured.series.items() if series.failures & {*BROKEN}]:
        raise HarnessError(
            f"cannot make a baseline of failed strategies: {'; '.join(_described(measured, broken))}",
            "repair these strategies and measure again, or leave them out of --strategies",
            exit_code=1,
        )
    if mixed := [name for name, value in measured.environment.items() if " | " in str(value)]:
        shown = "; ".join(f"{name}: {measured.environment[name]}" for name in mixed[:3])
        raise ConfigError(
            "the cells of one baseline must be comparable, but these cells were measured under"
            f" different settings ({shown})",
            "measure all cells again on one machine, with the same packages and variables",
        )


def _accepted(
    measured: MeasuredRuns,
    known: Sequence[Expectation],
    baseline_file: Path,
    accept: Callable[[Sequence[str]], bool],
) -> list[Expectation]:
    """Return the expected outcomes to add to ``known``.

    Raise HarnessError if repeats failed in different ways, or if ``accept`` returns False.
    """
    series = measured.series
    failed = [name for name in series if not is_expected(name, series[name], known)]
    if not failed:
        return []
    wanted = suggest(failed, series)
    mixed = [name for name in failed if not is_expected(name, series[name], wanted)]
    if mixed:
        raise HarnessError(
            f"repeats of one measurement failed in different ways: {'; '.join(_described(measured, mixed))}",
            "a baseline file has one outcome for each measurement: measure again, or leave these"
            " strategies out",
            exit_code=1,
        )
    lines = _described(measured, failed)
    if not accept(lines):
        again = f"weighin check RUN --baseline {quote(str(baseline_file))} --update"
        raise HarnessError(
            f"cannot make a baseline of outcomes that are not expected: {'; '.join(lines)}",
            f"if these outcomes are intended: {again} --expect-failures",
            exit_code=1,
        )
    return wanted


def _described(measured: MeasuredRuns, names: Sequence[str]) -> list[str]:
    short, _ = short_names(names)
    return [f"{short[name]}: {measured.series[name].outcome}" for name in names]


def _parsed(expected: Sequence[str]) -> tuple[Expectation, ...]:
    return tuple(expectation for text in expected for expectation in parse(text))
