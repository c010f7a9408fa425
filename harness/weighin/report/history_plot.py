"""Draw a metric over several runs, with one line per strategy and a mark at each lasting change."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from weighin.errors import ConfigError
from weighin.records import run_folder
from weighin.records.series import STRATEGY
from weighin.report import style as look
from weighin.report.history import History, Moment, SeriesHistory, changed, notes
from weighin.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS: Final = "osD^vP*X<>hp"
_LABELS: Final = 24  # the names of more runs do not fit below an axis
_NS: Final = 1e9


def draw(history: History, path: Path) -> Path:
    """Draw the history as PNG or SVG, according to the suffix of ``path``, and return the path.

    Raises:
        ConfigError: the suffix is neither ``.png`` nor ``.svg``.
        RecordError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in {"png", "svg"}:
        raise ConfigError(f"cannot draw {path}", "name a file that ends in .png or .svg")
    with run_folder.writing(path, repair="name another file with --out"), path.open("wb") as file:
        save(history, file, kind)
    return path


def save(history: History, file: BinaryIO, kind: str) -> None:
    """Write the drawing of a history to a file; ``kind`` is png or svg."""
    panels = _panels(history.lines)
    drawn = dict(list(panels.items())[: look.MAX_PANELS])
    figure, grid = look.new_figure(2.6 * len(drawn) + 0.7, len(drawn), 1, sharex=True)
    places = {moment.name: place for place, moment in enumerate(history.moments)}
    for axes, (title, lines) in zip(grid[:, 0], drawn.items(), strict=True):
        axes.set_title(look.verbatim(title), fontsize=9, loc="left")
        _panel(axes, history, lines, places)
    _name_runs(grid[-1, 0], history.moments)
    captions = [f"From {history.moments[0].name} to {history.moments[-1].name}.", *notes(history)]
    captions.append("▲▼: a step. ✕: not ok. Dotted: machine or software changed there.")
    if len(panels) > len(drawn):
        captions.append(
            f"{len(panels) - len(drawn)} more panels are not drawn: choose series with --series."
        )
    look.dress(figure, f"{history.metric.title} over {len(places)} runs", [], captions)
    look.save(figure, file, kind)


def _panels(lines: Sequence[SeriesHistory]) -> dict[str, list[SeriesHistory]]:
    """Group the lines into panels; the lines of one panel differ only in strategy and format."""
    panels: dict[str, list[SeriesHistory]] = {}
    for line in sorted(lines, key=lambda line: line.series):
        words = line.series.split(" ")
        title = " · ".join(words[:STRATEGY] + words[STRATEGY + 2 :])
        panels.setdefault(title, []).append(line)
    return panels


def _panel(
    axes: "Axes", history: History, lines: Sequence[SeriesHistory], places: dict[str, int]
) -> None:
    look.tidy(axes)
    is_time = history.metric.unit == "ns"
    scale = _NS if is_time else GIB
    axes.set_ylabel(f"{history.metric.name}, {'s' if is_time else 'GiB'}", fontsize=9)
    for number, line in enumerate(lines):
        _series(axes, line, places, scale, _MARKERS[number % len(_MARKERS)])
    _changes(axes, history)
    axes.set_xlim(-0.5, len(places) - 0.5)
    low, high = axes.get_ylim()
    room = max(high - low, 0.05 * high)  # so that a small change looks small
    axes.set_ylim(max(0.0, low - 0.15 * room), high + 0.25 * room)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _series(
    axes: "Axes", line: SeriesHistory, places: dict[str, int], scale: float, marker: str
) -> None:
    words = line.series.split(" ")
    shade = look.colour(words[STRATEGY])
    good = [(places[p.moment.name], p.figure) for p in line.points if p.figure]
    style: dict[str, Any] = {"color": shade, "markersize": 4, "linewidth": 1.2}
    label = look.verbatim(" ".join(words[STRATEGY : STRATEGY + 2]))
    xs, ys = [x for x, _ in good], [figure.median / scale for _, figure in good]
    axes.plot(xs, ys, marker=marker, markeredgecolor=look.INK, markeredgewidth=0.5, label=label, **style)  # fmt: skip
    axes.vlines(xs, [f.low / scale for _, f in good], [f.high / scale for _, f in good], color=shade, linewidth=1)  # fmt: skip
    for step in line.steps:
        sign = "▲" if step.now > step.was else "▼"
        share = f"{(step.now - step.was) / step.was:+.1%}" if step.was else "from 0"
        place = places[line.points[step.index].moment.name], step.now / scale
        axes.annotate(f"{sign} {share}", place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=7, color=look.INK)  # fmt: skip
    bad = [places[p.moment.name] for p in line.points if not p.figure]
    floor = min(ys, default=0.0)
    axes.plot(bad, [floor] * len(bad), marker="x", linestyle="", color=shade, markersize=7)


def _changes(axes: "Axes", history: History) -> None:
    """Draw a vertical line before each run on a changed machine or software, a possible cause of steps."""
    for place, (before, after) in enumerate(pairwise(history.moments), start=1):
        if changed(before, after):
            axes.axvline(place - 0.5, color=look.INK, linestyle=":", linewidth=1)


def _name_runs(axes: "Axes", moments: Sequence[Moment]) -> None:
    step = -(-len(moments) // _LABELS)
    places = range(0, len(moments), step)
    words = [_words(moments[place]) for place in places]
    axes.set_xticks(list(places), words, fontsize=6.5, rotation=60, ha="right")


def _words(moment: Moment) -> str:
    parts = (moment.started_at[:10], moment.commit, moment.torch and f"torch {moment.torch}")
    return look.verbatim("\n".join(part for part in parts if part) or moment.name)
