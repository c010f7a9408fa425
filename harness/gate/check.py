"""``weighin check``: one or several runs against a baseline file and budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from harness import journal
from harness.errors import ConfigError, RecordError
from harness.gate import baseline as baselines
from harness.gate import budgets
from harness.gate.judging import Judgement, judge
from harness.gate.metrics import named
from harness.gate.series import Run, Series, summarise
from harness.gate.settings import Setting, settings_of
from harness.record import Outcome


@dataclass(frozen=True, slots=True)
class Measured:
    """What some runs measured, taken together."""

    environment: dict[str, Setting]
    series: dict[str, Series]
    warnings: tuple[str, ...] = ()


def read_runs(folders: Sequence[Path]) -> Measured:
    """Return the series of all runs; the same series of two runs counts with all its repeats.

    Raises:
        RecordError: one is no run, or nothing was measured.
    """
    warnings: list[str] = []
    runs: list[Run] = []
    for folder in folders:
        records = journal.read(folder)
        if not records.results:
            raise RecordError(
                f"{folder} holds no record: nothing was measured",
                f"measure first: weighin bench --resume {quote(str(folder))}",
            )
        warnings += records.warnings
        runs.append(Run(records.results, _is_search(folder)))
    described = [one.environment for run in runs for one in run.results if one.environment]
    return Measured(settings_of(described), summarise(runs), tuple(warnings))


def _is_search(folder: Path) -> bool:
    """Tell whether the run looked for floors; a run without its plan is taken for a bench."""
    return (folder / journal.PLAN).exists() and "within" in journal.read_plan(folder).settings


def check(
    measured: Measured,
    baseline_file: Path | None,
    *,
    extra_budgets: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Judgement:
    """Judge what was measured. ``metrics`` are the only ones to compare, where there are some.

    Raises:
        ConfigError: no baseline and no budget, or one that cannot be used.
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
    rules = replace(rules, budgets=(*rules.budgets, *added))
    return judge(baseline, rules, measured.environment, measured.series)


def update(measured: Measured, baseline_file: Path) -> list[str]:
    """Write what was measured as the new baseline; returns the lines of the difference.

    Raises:
        ConfigError: some cell could not be measured, or the file cannot be used or written.
    """
    for name, series in measured.series.items():
        if Outcome.MEASUREMENT_FAILED in series.outcome:
            raise ConfigError(
                f"{name} could not be measured: {series.message or series.outcome}",
                "a baseline of it would accept anything: measure it again first",
            )
    if torn := [name for name, value in measured.environment.items() if " | " in str(value)]:
        shown = "; ".join(f"{name}: {measured.environment[name]}" for name in torn[:3])
        raise ConfigError(
            f"the cells were measured under different settings ({shown})",
            "measure them all on one machine, in one environment",
        )
    return baselines.update(baseline_file, measured.environment, measured.series)
