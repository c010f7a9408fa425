"""Compute the bars that show the peak memory of each strategy in report.html."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weighin.report import captions, operations, style
from weighin.report.html.geometry import Axis
from weighin.report.rows import Row
from weighin.result import Outcome
from weighin.units import GIB

_PER_CENT: Final = 100.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker on a bar at a peak, with the range of the repeats; in per cent of the axis's length."""

    kind: str
    at: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bar:
    id: str
    label: str
    colour: str
    is_ok: bool
    anonymous: float
    file: float
    marks: list[Mark]
    words: str
    tip: str


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A line across all bars at the model's size or RAM limit; ``at`` is None if it is off the axis."""

    kind: str
    text: str
    at: float | None


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: list[Bar]
    lines: list[ReferenceLine]
    ticks: list[tuple[float, str]]


def build(rows: Sequence[Row], ids: Mapping[str, str]) -> list[Panel]:
    """Return a panel for each group of comparable rows; all panels share one axis."""
    if not rows:
        return []
    scenes = list(style.scenes(rows))
    axis = Axis(max(style.extent_gib(group) for _, group in scenes) * 1.02, 0.0, _PER_CENT)
    return [_panel(title, group, axis, ids) for title, group in scenes]


def _panel(title: str, group: Sequence[Row], axis: Axis, ids: Mapping[str, str]) -> Panel:
    labels = style.row_labels(group)
    bars = [
        _bar(label, row, axis, ids[row["group"]]) for label, row in zip(labels, group, strict=True)
    ]
    lines = []
    if model := captions.model_size(group):
        lines.append(ReferenceLine("model", f"model {model / GIB:.3f} GiB", axis.at(model / GIB)))
    if limit := group[0]["ram_limit_bytes"]:
        at = axis.at(limit / GIB) if limit / GIB <= axis.top else None
        beyond = "" if at is not None else " →"
        lines.append(ReferenceLine("limit", f"RAM limit {captions.size(limit)}{beyond}", at))
    return Panel(title, bars, lines, axis.ticks())


def _bar(label: str, row: Row, axis: Axis, series_id: str) -> Bar:
    kind = operations.KINDS[row["operation"]]
    anonymous, file = row[kind.held[0]], row["file_sampled_bytes"]
    start = axis.at((anonymous or 0) / GIB)
    end = axis.at(((anonymous or 0) + (file or 0)) / GIB)
    marks = [
        _mark(name, row, key, axis)
        for name, key in (("rss", kind.peak[0]), ("cuda", "peak_cuda_allocated_bytes"))
        if row[key] is not None
    ]
    is_ok = row["outcome"] == Outcome.OK
    peak = row[kind.peak[0]]
    words = "not measured" if peak is None else f"{peak / GIB:.3f} GiB"
    words += "" if is_ok else f" · {captions.ending(row)}"
    return Bar(
        series_id, label, style.colour(row["strategy"]), is_ok, start, round(end - start, 1), marks,
        words, _tip(label, row),
    )  # fmt: skip


def _mark(name: str, row: Row, key: str, axis: Axis) -> Mark:
    at, low, high = (axis.at(row[f"{key}{end}"] / GIB) for end in ("", "_min", "_max"))
    return Mark(name, at, low, high)


def _tip(label: str, row: Row) -> str:
    """Return the text that the page shows while the mouse is over a bar: its peaks and maxima."""
    lines = [f"{label}: {captions.ending(row)}"]
    kind = operations.KINDS[row["operation"]]
    for key, words in (
        (kind.peak[0], f"{kind.peak[1]} {{}} GiB ({kind.peak_accuracy})"),
        ("peak_cgroup_bytes", "cgroup peak {} GiB (exact, with page cache)"),
        ("peak_cuda_allocated_bytes", "CUDA peak {} GiB (exact)"),
        (kind.held[0], f"{kind.held[1]} {{}} GiB (sampled)"),
        ("file_sampled_bytes", f"{kind.cached.partition(',')[0]} {{}} GiB (sampled)"),
    ):
        value, low, high = (row[f"{key}{end}"] for end in ("", "_min", "_max"))
        if value is not None:
            text = f"{value / GIB:.3f}"
            text += f" ({low / GIB:.3f} to {high / GIB:.3f})" if low != high else ""
            lines.append(words.format(text))
    return "\n".join(lines)
