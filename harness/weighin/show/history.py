"""Show a metric over all runs below a folder, in order of time, and where it changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from weighin.errors import ConfigError, RecordError
from weighin.records import run_folder
from weighin.records.machine import Setting, differences, settings_of
from weighin.records.metrics import Metric, named
from weighin.records.series import STRATEGY, Figure, Series, SeriesRun, summarise
from weighin.show import style as look
from weighin.show.table import Column, Lines, Table
from weighin.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

_COMMIT_LETTERS: Final = 9
_PUBLISHED: Final = "published"  # a folder of this name has the runs that a project publishes


@dataclass(frozen=True, slots=True)
class Moment:
    """One run in a history: the name of its folder, its start, its machine, and its series."""

    name: str
    started_at: str
    settings: Mapping[str, Setting]
    series: Mapping[str, Series]

    @property
    def commit(self) -> str:
        """The first nine characters of the commit, followed by + if tracked files had local changes."""
        commit = str(self.settings.get("git_commit") or "")[:_COMMIT_LETTERS]
        return commit + ("+" if commit and self.settings.get("git_dirty") else "")


@dataclass(frozen=True, slots=True)
class History:
    """The values of one metric in several runs, the oldest first; ``names`` are those of the series."""

    metric: Metric
    moments: list[Moment]
    names: list[str]
    warnings: list[str]

    def points(self, name: str) -> list[tuple[Moment, str, Figure | None]]:
        """Return each run that measured a series, with the outcome and the figure."""
        return [
            (moment, series.outcome, series.figures.get(self.metric.name))
            for moment in self.moments
            if (series := moment.series.get(name)) and series.outcome != "skipped"
        ]

    def steps(self, name: str) -> list[tuple[Moment, int, int]]:
        """Return where the metric left its level: the run, the level before, and the new one.

        It leaves the level by more than ``weighin check`` tolerates. A metric with noise must stay off
        the level in the next run too.
        """
        found = [(moment, figure.median) for moment, _, figure in self.points(name) if figure]
        steps: list[tuple[Moment, int, int]] = []
        level = found[0][1] if found else 0
        allowed = self.metric.tolerance.allowance
        lasts = self.metric.exact and self.metric.unit == "bytes"
        for at, (moment, now) in enumerate(found):
            later = found[at + 1][1] if at + 1 < len(found) else level
            is_off = abs(now - level) > allowed(level)
            if is_off and (lasts or (abs(later - level) > allowed(level) and (later > level) == (now > level))):  # fmt: skip
                steps.append((moment, level, now))
                level = now
        return steps

    def turns(self, name: str) -> list[tuple[Moment, str, str]]:
        """Return where the outcome changed: the run, the outcome before, and the new one."""
        both = pairwise(self.points(name))
        return [(now[0], was[1], now[1]) for was, now in both if was[1] != now[1]]


def read(folder: Path, metric: str, words: Sequence[str] = ()) -> History:
    """Return the history of a metric over every run below ``folder``.

    Only measurements whose names contain all ``words`` are in it. Runs below a folder "published" are
    left out, unless ``folder`` itself is or lies in it. What is left out causes warnings.

    Raises:
        UnknownName: no metric has the name ``metric``.
        ConfigError: ``folder`` is no folder or has no run, or no measurement has all ``words``.
    """
    chosen = named(metric)
    repair = "name a folder that contains runs, such as results, or the folder of one run"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", "name a folder that contains runs, such as results")  # fmt: skip
    moments, warnings, left_out = [], [], Counter[Path]()
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
        if results := records.results:
            name = str(path.parent.relative_to(folder)) if len(parts) > 1 else folder.name
            environment = settings_of([one.environment for one in results if one.environment])
            started = min((one.started_at for one in results if one.started_at), default="")
            moments.append(Moment(name, started, environment, summarise([SeriesRun(results)])))
    warnings += [
        f"the {count} runs in {path} are left out; to see these runs: weighin history {quote(str(path))}"
        for path, count in left_out.items()
    ]
    if not moments:
        raise ConfigError("; ".join([f"{folder} contains no run with a record", *warnings]), repair)
    moments.sort(key=lambda one: (one.started_at, one.name))
    history = History(chosen, moments, [], warnings)
    names = dict.fromkeys(name for moment in moments for name in moment.series)
    history.names.extend(n for n in names if all(word in n for word in words) and history.points(n))
    if not history.names:
        raise ConfigError(
            f"no series in the runs of {folder} has {' and '.join(map(repr, words))} in its name",
            "leave --series out to see the names of all series",
        )
    history.names.sort(key=lambda n: (-len(history.steps(n)) - len(history.turns(n)), n))
    return history


def document(history: History) -> list[Table | Lines]:
    """Return a table of each measurement's first and last figure, and a line for each change."""
    metric, rows, changes = history.metric, [], []
    for name in history.names:
        points = history.points(name)
        figures = [figure.median for _, _, figure in points if figure]
        fields = [metric.text(figures[0]), metric.text(figures[-1]), metric.change(figures[0], figures[-1])] if figures else ["-"] * 3  # fmt: skip
        rows.append([name, str(len(points)), *fields])
        for moment, was, now in history.steps(name):
            text = f"{name}: {metric.change(was, now)} since {moment.name} ({metric.text(was)} -> {metric.text(now)})"
            before = history.moments[history.moments.index(moment) - 1]
            if moment.commit and moment.commit != before.commit:
                text += f", commit {before.commit or 'unknown'} -> {moment.commit}"
            changes.append(text)
        changes += [
            f"{name}: {was} -> {now} since {at.name}" for at, was, now in history.turns(name)
        ]
    columns = [Column("series", is_name=True), *map(Column, ("runs", "first", "last", "change"))]
    moved = [
        f"machine or software changed since {after.name}: {'; '.join(texts)}"
        for before, after in pairwise(history.moments)
        if (texts := changed(before, after))
    ]
    title = f"{metric.title} over {len(history.moments)} runs"
    return [
        Table(title, columns, rows),
        Lines("", changes or ["no step: no series changed its level"]),
        Lines("", moved, "warning"),
        Lines("", _notes(metric), "dim"),
    ]


def _notes(metric: Metric) -> list[str]:
    how = "exact" if metric.exact else "sampled"
    lines = [f"{metric.name}: {how}; each figure is the median of a run's ok repeats. A step is a lasting change beyond the tolerance of weighin check."]  # fmt: skip
    if metric.unit == "ns":
        lines.append("Times of different runs differ for many reasons, so a step of a time proves nothing alone.")  # fmt: skip
    return lines


def changed(before: Moment, after: Moment) -> list[str]:
    """Return the settings of machine and software that both runs recorded, with different values."""
    found = differences(before.settings, after.settings, {})
    return [str(one) for one in found if one.was is not None and one.now is not None]


def as_json(history: History, pictures: Sequence[Path]) -> dict[str, Any]:
    """Return a metric of each run, and the runs at which the metric or an outcome changed."""
    none = dict.fromkeys(("low", "median", "high"))
    return {
        "metric": history.metric.name,
        "unit": history.metric.unit,
        "runs": [
            {"run": one.name, "started_at": one.started_at, "commit": one.commit, "torch": str(one.settings.get("torch") or "")}
            for one in history.moments
        ],
        "series": [
            {
                "series": name,
                "points": [
                    {"run": moment.name, "outcome": outcome} | (asdict(figure) if figure else none)
                    for moment, outcome, figure in history.points(name)
                ],
                "steps": [
                    {"run": one.name, "before": was, "now": now}
                    for one, was, now in history.steps(name)
                ],
                "outcome_changes": [
                    {"run": one.name, "before": was, "now": now}
                    for one, was, now in history.turns(name)
                ],
            }
            for name in history.names
        ],
        "warnings": list(history.warnings),
        "files": [str(path) for path in pictures],
    }  # fmt: skip


def draw(history: History) -> "Picture":
    """Draw the metric over the runs, a line for each series; dotted: machine or software changed there."""
    figure, grid = look.new_figure(3.6, 1, 1)
    axes, handles = grid[0][0], []
    places = {moment.name: place for place, moment in enumerate(history.moments)}
    is_time = history.metric.unit == "ns"
    for name in history.names[: look.MAX_PANELS]:
        points = [(places[at.name], one.median) for at, _, one in history.points(name) if one]
        handles += axes.plot(
            [x for x, _ in points], [y / (1e9 if is_time else GIB) for _, y in points], "o-",
            color=look.colour(name.split(" ")[STRATEGY]), label=look.verbatim(name),
        )  # fmt: skip
    for before, after in pairwise(history.moments):
        if changed(before, after):
            axes.axvline(places[after.name] - 0.5, color=look.INK, linestyle=":", linewidth=1)
    shown = list(places)[:: max(1, len(places) // 12)]
    axes.set_xticks([places[name] for name in shown], shown, fontsize=6.5, rotation=30, ha="right")
    look.frame_curves(axes, "run", f"{history.metric.name}, {'s' if is_time else 'GiB'}")
    title = f"{history.metric.title} over {len(places)} runs"
    look.dress(figure, title, handles, _notes(history.metric))
    return figure


def write(history: History, path: Path) -> Path:
    """Draw the history as PNG or SVG, according to the suffix of ``path``, and return the path."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in {"png", "svg"}:
        raise ConfigError(f"cannot draw {path}", "name a file that ends in .png or .svg")
    with run_folder.writing(path, repair="name another file with --out"):
        path.write_bytes(look.png(draw(history)) if kind == "png" else look.svg(draw(history)).encode())  # fmt: skip
    return path
