"""Compare the same measurements in several runs, such as those of two commits (``weighin compare``).

The output marks a figure that lies outside the range of the first run's repeats by more than the
metric's tolerance. Unlike ``weighin check``, the comparison neither passes nor fails.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from string import ascii_uppercase
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.errors import ConfigError
from weighin.gate.check import MeasuredRuns, read_machines, read_runs
from weighin.gate.evaluate import judge_figure
from weighin.gate.lines import Line, LineVerdict
from weighin.gate.tables import short_names
from weighin.records.machine import differences
from weighin.records.metrics import METRICS, Metric, named
from weighin.records.series import Series
from weighin.text import markdown, one_line

_STYLES: Final = {LineVerdict.REGRESSED: "bold red", LineVerdict.IMPROVED: "green"}
_SHORT_COMMIT: Final = 10
_OUTCOME: Final = "outcome"


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of one measurement in every run.

    Attributes:
        texts: the figure of each run as text; None for a run without the figure.
        lines: for each later run, the verdict on its figure against the first run's figure; None for
            outcomes, or if one of the two figures is missing.
    """

    series: str
    what: str
    texts: tuple[str | None, ...]
    lines: tuple[Line | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs side by side: a heading for each run, and a row for each metric of a measurement.

    ``common`` has the words that all names of measurements share. The names in ``rows`` lack them.
    """

    headings: tuple[str, ...]
    rows: tuple[ComparedMetric, ...]
    common: str
    warnings: tuple[str, ...] = ()


def compare(folders: Sequence[Path], metrics: Sequence[str] = ()) -> Comparison:
    """Compare the first run with each later run.

    Measurements with equal names are compared. Words that are the same in all names of one run, such
    as the isolation, may differ between runs; the heading of each run then shows its words.

    Raises:
        ConfigError: there are fewer than two runs, or more than 26.
        RecordError: a folder is not a run, or has no record.
    """
    if not 2 <= len(folders) <= len(ascii_uppercase):
        raise ConfigError(
            f"cannot compare {len(folders)} run{'s' * (len(folders) != 1)}",
            "name two or more folders of runs: weighin compare results/RUN_A results/RUN_B",
        )
    runs = [read_runs([folder]) for folder in folders]
    mixed = tuple(_mixed(folder, run) for folder, run in zip(folders, runs, strict=True))
    return _side_by_side(list(map(str, folders)), runs, metrics, tuple(filter(None, mixed)))


def compare_machines(folders: Sequence[Path], metrics: Sequence[str] = ()) -> Comparison:
    """Compare the figures of each kind of machine in the runs with those of the first kind.

    Raises:
        ConfigError: all records come from one kind of machine, or from more than 26.
        RecordError: a folder is not a run, or has no record.
    """
    machines = read_machines(folders)
    if not 2 <= len(machines) <= len(ascii_uppercase):
        raise ConfigError(
            f"cannot compare machines: the records come from {len(machines)} kind"
            f"{'s' * (len(machines) != 1)} of machine",
            "name runs that were measured on two kinds of machine or more, or leave out --by machine",
        )
    names = [
        f"machine {name}" + (f" ({', '.join(run.nodes)})" if run.nodes else "")
        for name, run in machines.items()
    ]
    return _side_by_side(names, list(machines.values()), metrics, ())


def _side_by_side(
    names: Sequence[str],
    runs: Sequence[MeasuredRuns],
    metrics: Sequence[str],
    mixed: tuple[str, ...],
) -> Comparison:
    chosen = [named(name) for name in metrics] or list(METRICS.values())
    own = _own_words(runs)
    keyed = [{_key(name, own): entry for name, entry in run.series.items()} for run in runs]
    shorts, common = short_names(name for series in keyed for name in series)
    rows = [
        row
        for name, short in shorts.items()
        for row in _rows(short, [series.get(name) for series in keyed], chosen)
    ]
    return Comparison(
        headings=tuple(_headings(names, runs, own)),
        rows=tuple(rows),
        common=common,
        warnings=tuple(dict.fromkeys((*mixed, *(text for run in runs for text in run.warnings)))),
    )


def _mixed(folder: Path, run: MeasuredRuns) -> str:
    """Return a warning if a run was measured on several kinds of machine, and otherwise an empty text."""
    if len(run.machines) < 2:
        return ""
    return (
        f"the figures of {folder} are from {len(run.machines)} kinds of machine:"
        f" weighin compare {quote(str(folder))} --by machine compares these"
    )


def terminal(comparison: Comparison) -> RenderableType:
    """Return a table for a terminal, with the difference from the first run below each figure."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("series", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for letter in _letters(comparison):
        table.add_column(letter, justify="right")
    last = None
    for row in comparison.rows:
        cells = [Text(row.texts[0] or "-")]
        for text, line in zip(row.texts[1:], row.lines, strict=True):
            cells.append(_cell(text, line))
        table.add_row(row.series if row.series != last else "", row.what, *cells)
        last = row.series
    parts: list[RenderableType] = [Text(heading) for heading in comparison.headings]
    parts.append(table)
    if comparison.common:
        parts.append(Text(f"all: {comparison.common}", style="dim"))
    parts.append(Text(_summary(comparison), style="bold"))
    return Group(*parts)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as data for ``--json``."""
    return {
        "runs": list(comparison.headings),
        "common": comparison.common,
        "rows": [
            {
                "series": row.series,
                "metric": row.what,
                "texts": list(row.texts),
                "compared": [_compared(line) for line in row.lines],
            }
            for row in comparison.rows
        ],
        "warnings": list(comparison.warnings),
    }


def _compared(line: Line | None) -> dict[str, Any] | None:
    if line is None or line.metric is None:
        return None
    return {
        "unit": line.metric.unit,
        "before": line.was,
        "now": line.now,
        "changed_beyond_noise": line.verdict in _STYLES,
    }


def write_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown, with changes beyond the tolerance in bold."""
    heads = ["series", "metric", *_letters(comparison)]
    rows = [heads, ["---", "---", *("---:" for _ in _letters(comparison))]]
    for row in comparison.rows:
        cells = [markdown(row.texts[0] or "-")]
        for text, line in zip(row.texts[1:], row.lines, strict=True):
            change = markdown(_change(line))
            changed = line is not None and line.verdict in _STYLES
            cells.append(
                markdown(text or "-") + (f" **{change}**" if changed else f" {change}").rstrip()
            )
        rows.append([markdown(row.series), markdown(row.what), *cells])
    lines = [f"- {markdown(heading)}" for heading in comparison.headings]
    table = [f"| {' | '.join(row)} |" for row in rows]
    end = [f"All: {markdown(comparison.common)}", ""] if comparison.common else []
    return "\n".join([*lines, "", *table, "", *end, markdown(_summary(comparison)), ""])


def _rows(
    name: str, series: Sequence[Series | None], metrics: Iterable[Metric]
) -> Iterator[ComparedMetric]:
    outcomes = [each.outcome if each else None for each in series]
    if any(outcome != "ok" for outcome in outcomes):
        yield ComparedMetric(name, _OUTCOME, tuple(outcomes), (None,) * (len(series) - 1))
    for metric in metrics:
        figures = [each.figures.get(metric.name) if each else None for each in series]
        if not any(figures):
            continue
        first = figures[0]
        lines = tuple(
            judge_figure(name, metric, metric.tolerance, first, other, ())
            if first and other
            else None
            for other in figures[1:]
        )
        texts = tuple(metric.text(figure.median) if figure else None for figure in figures)
        yield ComparedMetric(name, metric.title, texts, lines)


def _cell(text: str | None, line: Line | None) -> Text:
    cell = Text(text or "-")
    if line and line.was and line.now is not None:
        share = f"\n{(line.now - line.was) / line.was * 100:+.1f} %"
        cell.append(share, style=_STYLES.get(line.verdict, "dim"))
    return cell


def _change(line: Line | None) -> str:
    if line is None or line.metric is None or line.was is None or line.now is None:
        return ""
    return line.metric.change(line.was, line.now)


def _summary(comparison: Comparison) -> str:
    verdicts = [line.verdict for row in comparison.rows for line in row.lines if line]
    worse, better = verdicts.count(LineVerdict.REGRESSED), verdicts.count(LineVerdict.IMPROVED)
    outcomes = [row.texts for row in comparison.rows if row.what == _OUTCOME]
    failed = sum(
        was == "ok" and now not in (None, "ok") for was, *later in outcomes for now in later
    )
    return (
        f"{len(verdicts)} figures compared with A: {worse} larger and {better} smaller beyond noise"
        + (f"; {failed} measurement{'s' * (failed > 1)} no longer ok" if failed else "")
    )


def _letters(comparison: Comparison) -> str:
    return ascii_uppercase[: len(comparison.headings)]


def _own_words(runs: Sequence[MeasuredRuns]) -> set[int]:
    """Return the word positions in names at which each run has a single word, but the runs differ."""
    words = [[name.split(" ") for name in run.series] for run in runs]
    shortest = min(len(name) for names in words for name in names)
    own = set()
    for place in range(shortest):
        by_run = [{name[place] for name in names} for names in words]
        if all(len(here) == 1 for here in by_run) and len(set.union(*by_run)) > 1:
            own.add(place)
    return own


def _key(name: str, own: set[int]) -> str:
    """Return the name of a measurement with empty words at the positions ``own``."""
    return " ".join("" if place in own else word for place, word in enumerate(name.split(" ")))


def _headings(names: Sequence[str], runs: Sequence[MeasuredRuns], own: set[int]) -> Iterator[str]:
    """Yield a heading for each run: its name, commit, torch, and its differences from the first run."""
    for letter, name, run in zip(ascii_uppercase, names, runs, strict=False):
        words = next(iter(run.series)).split(" ")
        facts = [str(covered) for covered in run.incomplete.values()]
        facts += [words[place] for place in sorted(own)]
        for key, before in (("git_commit", "commit "), ("torch", "torch ")):
            if value := run.environment.get(key):
                facts.append(
                    f"{before}{str(value)[:_SHORT_COMMIT] if key == 'git_commit' else value}"
                )
        changes = differences(runs[0].environment, run.environment, {})
        facts += [str(change) for change in changes if change.name != "torch"]
        yield one_line(f"{letter} = {name}: {', '.join(facts) or 'environment unknown'}")
