"""Compute the plots of time over memory in report.html, with the Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weighin.report import style
from weighin.report.html.geometry import Axis, Label, pareto_front, path, place_labels
from weighin.report.rows import Row
from weighin.units import GIB

WIDTH: Final = 520
HEIGHT: Final = 300
FONT: Final = 13
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 506.0, 14.0, 256.0
# The memory figures among which the reader chooses for the x axis; the page begins with the first.
_FIGURES: Final = (
    ("peak_rss_bytes", "peak RSS, GiB (exact)"),
    ("needed_bytes", "need, GiB (at least)"),
    ("anon_sampled_bytes", "anonymous memory, GiB (sampled)"),
    ("peak_cuda_allocated_bytes", "CUDA peak, GiB (exact)"),
)


@dataclass(frozen=True, slots=True)
class ScatterPoint:
    x: float
    y: float
    colour: str
    label: Label
    is_front: bool
    tip: str


@dataclass(frozen=True, slots=True)
class Plot:
    x_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    points: list[ScatterPoint]
    front: str
    front_names: list[str]


def build(rows: Sequence[Row]) -> list[tuple[str, Plot]]:
    """Return titled plots: one for each group of comparable rows and each memory figure.

    A plot has the rows whose repeats all ended ok: at least two, of which one has a figure above 0.
    """
    plots = []
    for title, group in style.scenes(rows):
        good = [row for row in group if row["ok"] == row["repeats"] and row["ready_s"] is not None]
        for key, words in _FIGURES:
            measured = [row for row in good if row[key] is not None]
            if len(measured) > 1 and any(row[key] for row in measured):
                plots.append((title, _plot(measured, key, words)))
    return plots


def _plot(measured: Sequence[Row], key: str, words: str) -> Plot:
    data = [(row[key] / GIB, row["ready_s"]) for row in measured]
    across = Axis(max(x for x, _ in data) * 1.08, _LEFT, _RIGHT)
    up = Axis(max(y for _, y in data) * 1.12, _BOTTOM, _TOP)
    names = style.row_labels(measured)
    front = pareto_front(data)
    places = [(across.at(x), up.at(y), name) for (x, y), name in zip(data, names, strict=True)]
    labels = place_labels(places, WIDTH, _BOTTOM, FONT)
    points = [
        ScatterPoint(
            across.at(x),
            up.at(y),
            style.colour(row["strategy"]),
            label,
            (x, y) in front,
            _tip(label.text, x, y, words, is_front=(x, y) in front),
        )
        for (x, y), label, row in zip(data, labels, measured, strict=True)
    ]
    steps = [(across.at(front[0][0]), _TOP)]
    for x, y in front:
        steps += [(across.at(x), steps[-1][1]), (across.at(x), up.at(y))]
    steps.append((_RIGHT, steps[-1][1]))
    on_front = [label.text for label, point in zip(labels, points, strict=True) if point.is_front]
    return Plot(words, across.ticks(6), up.ticks(), points, path(steps), on_front)


def _tip(name: str, memory: float, ready_s: float, words: str, *, is_front: bool) -> str:
    figure, _, accuracy = words.partition(", GiB ")
    lines = [name, f"{figure} {memory:.3f} GiB {accuracy}", f"ready in {ready_s:.2f} s"]
    if is_front:
        lines.append("on the Pareto front: no other is better in both")
    return "\n".join(lines)
