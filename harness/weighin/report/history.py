"""Read a metric from all runs below a folder, and find the runs at which the metric changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from weighin.errors import ConfigError, RecordError
from weighin.records import run_folder
from weighin.records.machine import Difference, Setting, differences, settings_of
from weighin.records.metrics import Metric, middle, named
from weighin.records.series import Figure, SeriesRun, summarise
from weighin.report.change_points import find_steps
from weighin.report.findings import Found, of_texts

_COMMIT_LETTERS: Final = 9
_PUBLISHED: Final = "published"  # a folder of this name has the runs that a project publishes
_SEVERAL: Final = 2  # the number of runs for which a new level of a metric with noise must last


@dataclass(frozen=True, slots=True)
class Moment:
    """One run in a history: the name of its folder, its start, and its machine and software."""

    name: str
    started_at: str
    settings: Mapping[str, Setting]

    @property
    def commit(self) -> str:
        """The first nine characters of the commit, followed by + if tracked files had local changes."""
        commit = str(self.settings.get("git_commit") or "")[:_COMMIT_LETTERS]
        return commit + ("+" if commit and self.settings.get("git_dirty") else "")

    @property
    def torch(self) -> str:
        return str(self.settings.get("torch") or "")


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One measurement in one run; ``figure`` is None if no ok repeat has the metric."""

    moment: Moment
    outcome: str
    figure: Figure | None


@dataclass(frozen=True, slots=True)
class Step:
    """A lasting change of a metric; it begins at ``SeriesHistory.points[index]``.

    Attributes:
        was: the median of the metric in the runs before this change, back to the previous change.
        now: the median of the metric in the runs from this change to the next change.
        moved: the settings, such as the version of torch, that differ between run ``index`` and the
            run before.
    """

    index: int
    was: int
    now: int
    moved: list[Difference]


@dataclass(frozen=True, slots=True)
class SeriesHistory:
    """The history of one measurement: a point for each run that made this measurement."""

    series: str
    points: list[HistoryPoint]
    steps: list[Step]
    turns: list[tuple[int, str, str]]
    """For each change of the outcome: the index in ``points``, the old and the new outcome."""


@dataclass(frozen=True, slots=True)
class History:
    """The values of one metric in several runs; ``moments`` are the runs, the oldest first."""

    metric: Metric
    moments: list[Moment]
    lines: list[SeriesHistory]
    warnings: list[str]


def read(folder: Path, metric: str, words: Sequence[str] = ()) -> History:
    """Return the history of a metric over every run below ``folder``.

    Only measurements whose names contain all ``words`` are in the history. Runs below a folder called
    "published" are left out, unless ``folder`` itself is or lies in such a folder. Runs that are
    left out or cannot be read cause warnings.

    Raises:
        UnknownName: no metric has the name ``metric``.
        ConfigError: ``folder`` is no folder or has no run, no measurement has all ``words`` in its
            name, or ruptures is not installed.
    """
    chosen = named(metric)
    runs, warnings = _runs(folder)
    if not runs:
        raise ConfigError(
            "; ".join([f"{folder} contains no run with a record", *warnings]),
            "name a folder that contains runs, such as results, or the folder of one run",
        )
    points: dict[str, list[HistoryPoint]] = {}
    for moment, results in runs:
        for name, series in summarise([SeriesRun(results)]).items():
            if all(word in name for word in words) and series.outcome != "skipped":
                point = HistoryPoint(moment, series.outcome, series.figures.get(chosen.name))
                points.setdefault(name, []).append(point)
    if not points:
        raise ConfigError(
            f"no series in the runs of {folder} has {' and '.join(map(repr, words))} in its name",
            "leave --series out to see the names of all series",
        )
    lines = [_line(name, series_points, chosen) for name, series_points in points.items()]
    lines.sort(key=lambda line: (-len(line.steps) - len(line.turns), line.series))
    return History(chosen, [moment for moment, _ in runs], lines, warnings)


def terminal_table(history: History) -> RenderableType:
    """Return a table of each measurement's first and last figure; lines below it describe all changes."""
    rows, texts = [], []
    for line in history.lines:
        figures = [point.figure.median for point in line.points if point.figure]
        fields = ["-", "-", "-"]
        if figures:
            was, now = figures[0], figures[-1]
            fields = [*map(history.metric.text, (was, now)), history.metric.change(was, now)]
        rows.append([line.series, str(len(line.points)), *fields])
        texts += describe(line, history.metric)
    heads = ("series", "runs", "first", "last", "change")
    parts: list[RenderableType] = [
        Text(f"{history.metric.title} over {len(history.moments)} runs", style="bold"),
        Found("", heads, of_texts(rows)).terminal(),
        *map(Text, texts),
    ]
    parts += [Text(text, style="yellow") for text in _changes(history.moments)]
    if not any(line.steps or line.turns for line in history.lines):
        parts.append(Text("no step: no series changed its level"))
    parts += [Text(text, style="dim") for text in notes(history)]
    return Group(*parts)


def describe(line: SeriesHistory, metric: Metric) -> list[str]:
    """Return a sentence for each lasting change of the metric, and for each change of the outcome."""
    sentences = []
    for step in line.steps:
        before, after = (line.points[index].moment for index in (step.index - 1, step.index))
        change = metric.change(step.was, step.now)
        text = f"{line.series}: {change} since {after.name} ({metric.text(step.was)} -> {metric.text(step.now)})"
        if after.commit and after.commit != before.commit:
            text += f", commit {before.commit or 'unknown'} -> {after.commit}"
        if step.moved:
            text += f"; also changed: {'; '.join(map(str, step.moved))}"
        sentences.append(text)
    for index, was, now in line.turns:
        sentences.append(f"{line.series}: {was} -> {now} since {line.points[index].moment.name}")
    return sentences


def notes(history: History) -> list[str]:
    """Return sentences that explain the figures and the steps of a history."""
    how = "exact" if history.metric.exact else "sampled"
    lines = [
        f"{history.metric.name}: {how}; each figure is the median of a run's ok repeats.",
        "Steps: lasting changes beyond the tolerance of weighin check (change points by PELT, least squares).",
    ]
    if history.metric.unit == "ns":
        lines.append(
            "Times of different runs differ for many reasons, so a step of a time proves nothing alone."
        )
    return lines


def _runs(folder: Path) -> tuple[list[tuple[Moment, Sequence[Any]]], list[str]]:
    """Return the runs below a folder that are not published, the oldest first, and warnings."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", "name a folder that contains runs, such as results"
        )
    runs, warnings = [], []
    left_out: Counter[Path] = Counter()
    for path in sorted(folder.rglob(run_folder.RECORDS)):
        parts = path.relative_to(folder).parts
        if _PUBLISHED in parts:
            left_out[folder.joinpath(*parts[: parts.index(_PUBLISHED) + 1])] += 1
            continue
        try:
            records = run_folder.read_whole(path.parent)
        except RecordError as error:
            warnings.append(f"{error.message}: this run is left out")
            continue
        warnings += records.warnings
        if not records.results:
            continue
        results = records.results
        name = str(path.parent.relative_to(folder)) if path.parent != folder else folder.name
        environments = [result.environment for result in results if result.environment]
        started = min((r.started_at for r in results if r.started_at), default="")
        runs.append((Moment(name, started, settings_of(environments)), results))
    warnings += [
        f"the {count} runs in {path} are left out; to see these runs:"
        f" weighin history {quote(str(path))}"
        for path, count in left_out.items()
    ]
    return sorted(runs, key=lambda run: (run[0].started_at, run[0].name)), warnings


def _line(name: str, points: list[HistoryPoint], metric: Metric) -> SeriesHistory:
    measured = [index for index, point in enumerate(points) if point.figure]
    figures = [figure.median for point in points if (figure := point.figure)]
    steps = []
    if (typical := middle(figures)) is not None:
        allowance = metric.tolerance.allowance(typical)
        is_certain = metric.exact and metric.unit == "bytes"
        places = find_steps(figures, allowance, 1 if is_certain else _SEVERAL)
        edges = [0, *places, len(figures)]
        for before, start, end in zip(edges, edges[1:], edges[2:], strict=False):
            was, now = middle(figures[before:start]), middle(figures[start:end])
            assert was is not None
            assert now is not None
            index = measured[start]
            moved = changed(points[index - 1].moment, points[index].moment)
            steps.append(Step(index, was, now, moved))
    turns = [
        (index, before.outcome, after.outcome)
        for index, (before, after) in enumerate(pairwise(points), start=1)
        if before.outcome != after.outcome
    ]
    return SeriesHistory(name, points, steps, turns)


def _changes(moments: Sequence[Moment]) -> list[str]:
    """Return a line for each run whose machine or software differs from the previous run's."""
    return [
        f"machine or software changed since {after.name}: {'; '.join(map(str, moved))}"
        for before, after in pairwise(moments)
        if (moved := changed(before, after))
    ]


def changed(before: Moment, after: Moment) -> list[Difference]:
    """Return the settings of machine and software that both runs recorded, with different values."""
    return [
        difference
        for difference in differences(before.settings, after.settings, {})
        if difference.was is not None and difference.now is not None
    ]
