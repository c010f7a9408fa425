"""``weighin check``: one or several runs against a baseline file and budgets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from weighin.errors import ConfigError, NoBaseline, RecordError
from weighin.exit_codes import BROKEN
from weighin.gate import baseline as baselines
from weighin.gate import budgets, freeze
from weighin.gate.evaluate import evaluate
from weighin.gate.expected import Expectation, is_expected, parse, suggest
from weighin.gate.lines import GateResult
from weighin.gate.tables import short_names
from weighin.record import Outcome
from weighin.records import run_folder
from weighin.records.machine import Setting, settings_of
from weighin.records.metrics import named
from weighin.records.series import Series, SeriesRun, summarise


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """What some runs measured, taken together."""

    environment: dict[str, Setting]
    series: dict[str, Series]
    warnings: tuple[str, ...] = ()


def read_runs(folders: Sequence[Path]) -> MeasuredRuns:
    """Return the series of all runs; the same series of two runs counts with all its repeats.

    Raises:
        RecordError: one is no run, or nothing was measured.
    """
    warnings: list[str] = []
    runs: list[SeriesRun] = []
    for folder in folders:
        records = run_folder.read(folder)
        if not records.results:
            raise RecordError(
                f"{folder} holds no record: nothing was measured",
                f"measure first: weighin bench --resume {quote(str(folder))}",
            )
        warnings += records.warnings
        runs.append(SeriesRun(records.results, _is_search(folder)))
    described = [one.environment for run in runs for one in run.results if one.environment]
    return MeasuredRuns(settings_of(described), summarise(runs), tuple(warnings))


def _is_search(folder: Path) -> bool:
    """Tell whether the run looked for floors; a run without its plan is taken for a bench."""
    return (folder / run_folder.PLAN).exists() and "within" in run_folder.read_plan(folder).settings


def check(
    measured: MeasuredRuns,
    baseline_file: Path | None,
    *,
    extra_budgets: Sequence[str] = (),
    metrics: Sequence[str] = (),
    expected: Sequence[str] = (),
) -> GateResult:
    """Judge what was measured. ``metrics`` are the only ones to compare, where there are some.

    ``expected`` are outcomes that are meant to be so, beside those of the baseline file.

    Raises:
        ConfigError: no baseline and no budget, or one that cannot be used; so of ``expected``.
    """
    if baseline_file is None and not extra_budgets:
        raise ConfigError(
            "nothing to check against",
            'name a file with --baseline, or a bound with --budget "peak_rss <= 8GiB"',
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
    return evaluate(baseline, rules, measured.environment, measured.series)


def update(
    measured: MeasuredRuns,
    baseline_file: Path,
    *,
    expected: Sequence[str] = (),
    accept: Callable[[Sequence[str]], bool],
) -> list[str]:
    """Write what was measured as the new baseline; returns the lines of the difference.

    ``expected`` is written with it. ``accept`` is asked about all else that is not ok, a line a
    series, and answers whether that is to be expected from now on.

    Raises:
        ConfigError: some cell could not be measured, or the file cannot be used or written.
        NoBaseline: a strategy is wrong or failed, or something is not ok and was not accepted.
    """
    _refuse(measured)
    typed = _parsed(expected)
    known = baselines.read(baseline_file).rules.expected if baseline_file.exists() else ()
    wanted = [*typed, *_accepted(measured, [*known, *typed], baseline_file, accept)]
    return freeze.update(baseline_file, measured.environment, measured.series, wanted)


def _refuse(measured: MeasuredRuns) -> None:
    for name, series in measured.series.items():
        if Outcome.MEASUREMENT_FAILED in series.outcome:
            raise ConfigError(
                f"{name} could not be measured: {series.message or series.outcome}",
                "a baseline of it would accept anything: measure it again first",
            )
    if broken := [name for name, one in measured.series.items() if one.failures & {*BROKEN}]:
        raise NoBaseline(
            f"no baseline is made of what is broken: {'; '.join(_described(measured, broken))}",
            "mend it and measure it again, or measure without it",
        )
    if torn := [name for name, value in measured.environment.items() if " | " in str(value)]:
        shown = "; ".join(f"{name}: {measured.environment[name]}" for name in torn[:3])
        raise ConfigError(
            f"the cells were measured under different settings ({shown})",
            "measure them all on one machine, in one environment",
        )


def _accepted(
    measured: MeasuredRuns,
    known: Sequence[Expectation],
    baseline_file: Path,
    accept: Callable[[Sequence[str]], bool],
) -> list[Expectation]:
    """Return what is to be expected beside what is ``known``, once it was accepted."""
    series = measured.series
    failed = [name for name, one in series.items() if not is_expected(name, one, known)]
    if not failed:
        return []
    wanted = suggest(failed, series)
    torn = [name for name in failed if not is_expected(name, series[name], wanted)]
    if torn:
        raise NoBaseline(
            f"not ok in more than one way: {'; '.join(_described(measured, torn))}",
            "a baseline expects one outcome of a series: measure it again, or measure without it",
        )
    lines = _described(measured, failed)
    if not accept(lines):
        again = f"weighin check RUN --baseline {quote(str(baseline_file))} --update"
        raise NoBaseline(
            f"not ok, and not expected: {'; '.join(lines)}",
            f"where that is meant to be so: {again} --expect-failures",
        )
    return wanted


def _described(measured: MeasuredRuns, names: Sequence[str]) -> list[str]:
    short, _ = short_names(names)
    shown = [(name, measured.series[name]) for name in names]
    return [f"{short[name]}: {one.outcome}" for name, one in shown]


def _parsed(expected: Sequence[str]) -> tuple[Expectation, ...]:
    return tuple(one for text in expected for one in parse(text))
