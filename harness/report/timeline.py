"""Resident memory over time, one small panel a series, on shared axes."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from harness.record import Outcome, Result
from harness.report import captions, look
from harness.report.frame import cells, samples, series
from harness.units import GIB, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Outcomes that cut a cell off: the figure marks where.
_CUT_OFF: Final = frozenset(
    {
        Outcome.OOM_KILLED,
        Outcome.CUDA_OOM,
        Outcome.TIMEOUT,
        Outcome.STRATEGY_FAILED,
        Outcome.MEASUREMENT_FAILED,
    }
)
_PARTS: Final = ("anon_bytes", "file_bytes", "shmem_bytes")
_HEADROOM: Final = 1.4  # above the data, for the names of phases
_POINTS: Final = 1500  # more than the pixels of a panel
_CHARACTER: Final = 0.0145  # of a panel's width, at the size in which phases are named


@dataclass(frozen=True, slots=True)
class _Track:
    """One cell's memory over time: seconds from its first mark, and what to call it."""

    label: str
    result: Result
    table: pd.DataFrame | None
    zero_ns: int
    end_s: float


def draw_timeline(run: Path, results: Sequence[Result]) -> "Figure":
    """Return RSS over time of the first repeat of each series, phases shaded and named.

    A cell without readable samples keeps its panel, which says so.
    """
    if not results:
        return look.empty_figure("Memory over time while loading")
    frame = series(results)
    tracks = _tracks(run, results, frame)
    shown = tracks[: look.MAX_PANELS]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = look.new_figure(rows * 2.2 + 0.2, rows, columns, sharex=True, sharey=True)
    span, top = _span(shown), _top(shown)
    for axes, track in zip(grid.flat, shown, strict=False):
        axes.set_xlim(0, span)
        axes.set_ylim(0, top * _HEADROOM)
        _panel(axes, track, span)
    for axes in grid.flat[len(shown) :]:
        axes.axis("off")
    for axes in grid[:, 0]:
        axes.set_ylabel("RSS, GiB", fontsize=9)
    for axes in grid.flat[max(0, len(shown) - columns) : len(shown)]:
        axes.tick_params(labelbottom=True)  # also where the panel below is empty
    for axes in grid.flat[(rows - 1) * columns : len(shown)]:
        axes.set_xlabel("time since the worker started, s", fontsize=9)
    title = look.headline(frame, "Memory over time while loading")
    look.dress(figure, title, _legend(shown, top * _HEADROOM), _caption(frame, results, tracks))
    return figure


def _tracks(run: Path, results: Sequence[Result], frame: pd.DataFrame) -> list[_Track]:
    """Choose the first repeat of each series, and read its samples."""
    table = cells(results)
    last = {result.cell.id: result for result in results}
    first = dict(zip(reversed(table["group"].tolist()), reversed(list(last.values())), strict=True))
    labels = look.row_labels(frame)
    scene = [name for name in look.SCENE if frame[name].nunique(dropna=False) > 1]
    tracks = []
    for label, (_, row) in zip(labels, frame.iterrows(), strict=True):
        result = first[row["group"]]
        words = [captions.dimension(name, row[name]) for name in scene]
        tracks.append(_track(" · ".join([label, *words]), result, samples(run, result)))
    return tracks


def _track(label: str, result: Result, table: pd.DataFrame | None) -> _Track:
    starts = [phase.start_ns for phase in result.phases]
    ends = [phase.end_ns for phase in result.phases]
    if table is not None:
        starts.append(int(table["t_ns"].iloc[0]))
        ends.append(int(table["t_ns"].iloc[-1]))
    zero = min(starts, default=0)
    return _Track(label, result, table, zero, (max(ends, default=0) - zero) / 1e9)


def _span(tracks: Sequence[_Track]) -> float:
    """Return the shared time axis in seconds: a time-out must not squeeze all others."""
    ended = [t.end_s for t in tracks if t.result.outcome is not Outcome.TIMEOUT and t.end_s]
    longest = max((track.end_s for track in tracks), default=0.0)
    return min(longest, 2 * max(ended)) * 1.02 if ended else longest or 1.0


def _top(tracks: Sequence[_Track]) -> float:
    """Return the shared memory axis in GiB, with the limit on it where it is near the data."""
    tables = [track.table for track in tracks if track.table is not None]
    data = max((float(table["rss_bytes"].max()) for table in tables), default=0.0)
    limits = [track.result.cell.ram_limit_bytes or 0 for track in tracks]
    near = [limit for limit in limits if not data or limit <= 2 * data]
    return max([data, *near]) / GIB or 1.0


def _panel(axes: "Axes", track: _Track, span: float) -> None:
    look.tidy(axes)
    axes.set_title(
        look.verbatim(f"{track.label}: {track.result.outcome}"), fontsize=9, loc="left", pad=13
    )
    _limit(axes, track.result.cell.ram_limit_bytes)
    if track.table is None:
        why = "not run" if track.result.outcome is Outcome.SKIPPED else "no samples"
        axes.text(0.5, 0.4, why, transform=axes.transAxes, ha="center", fontsize=9, color=look.INK)
        if not track.end_s:
            return
    else:
        _areas(axes, track, track.table)
    _phases(axes, track, span)
    if track.result.outcome in _CUT_OFF:
        _cut(axes, track, span)


def _limit(axes: "Axes", limit: int | None) -> None:
    """Draw the RAM limit, or say that it lies beyond the axis."""
    if limit and limit / GIB <= axes.get_ylim()[1]:
        axes.axhline(limit / GIB, color="black", linestyle="--", linewidth=1.2, zorder=3)
    elif limit:
        said = f"RAM limit {captions.size(limit)} ↑"
        axes.annotate(said, (0.99, 0.86), xycoords="axes fraction", ha="right", fontsize=7)


def _areas(axes: "Axes", track: _Track, table: pd.DataFrame) -> None:
    """Stack anonymous, file-backed and shared memory."""
    step = -(-len(table) // _POINTS)
    # The look with the most memory of each bin: thinning must not lose a spike.
    thin = table.loc[table.groupby(table.index // step)["rss_bytes"].idxmax()]
    seconds = (thin["t_ns"] - track.zero_ns) / 1e9
    shade = look.colour(track.result.cell.strategy)
    colours: list[Any] = [shade, look.tint(shade), "white"]
    layers = [thin[name] / GIB for name in _PARTS]
    drawn = axes.stackplot(seconds, *layers, colors=colours, labels=_PARTS)
    drawn[2].set_hatch("....")
    axes.plot(seconds, sum(layers), color=look.INK, linewidth=0.8)


def _phases(axes: "Axes", track: _Track, span: float) -> None:
    """Shade every other phase and name it; what is too short for a name is listed above the panel."""
    spans = [
        (p.name, (p.start_ns - track.zero_ns) / 1e9, (p.end_ns - track.zero_ns) / 1e9)
        for p in track.result.phases
    ]
    last = track.result.last_phase
    if track.result.outcome in _CUT_OFF and last and last not in {name for name, _, _ in spans}:
        spans.append((last, spans[-1][2] if spans else 0.0, track.end_s))
    short = []
    style: dict[str, Any] = {
        "transform": axes.get_xaxis_transform(),
        "va": "top",
        "fontsize": 7,
        "color": look.INK,
    }
    for index, (name, start, end) in enumerate(spans):
        if index % 2 == 0:
            axes.axvspan(start, end, color="#EEEEEE", linewidth=0, zorder=0)
        width = (min(end, span) - start) / span
        if width >= _CHARACTER * (len(name) + 1):
            axes.text((start + min(end, span)) / 2, 0.97, look.verbatim(name), ha="center", **style)
        elif width >= 0.03:
            axes.text(
                (start + end) / 2, 0.97, look.verbatim(name), ha="center", rotation=90, **style
            )
        else:
            short.append(f"{name} {format_seconds(round((end - start) * 1e9))}")
    if short:
        note = textwrap.shorten("short phases: " + ", ".join(short), 88, placeholder=" …")
        axes.text(
            0, 1.02, look.verbatim(note), transform=axes.transAxes, fontsize=6.5, color=look.INK
        )


def _cut(axes: "Axes", track: _Track, span: float) -> None:
    """Mark where the cell was cut off."""
    table, outcome = track.table, track.result.outcome
    if track.end_s > span:
        axes.annotate(
            f"{outcome} at {track.end_s:.0f} s →",
            (0.99, 0.72),
            xycoords="axes fraction",
            ha="right",
            fontsize=8,
        )
        return
    height = float(table["rss_bytes"].iloc[-1]) / GIB if table is not None else 0.0
    axes.plot(track.end_s, height, "X", color="black", markersize=9, zorder=5, label="cut off")
    side = "right" if track.end_s > span / 2 else "left"
    axes.annotate(
        look.verbatim(f"{outcome} in {track.result.last_phase or 'no phase'}"),
        (track.end_s, height), xytext=(-7 if side == "right" else 7, 4),
        textcoords="offset points", ha=side, va="bottom", fontsize=8,
    )  # fmt: skip


def _legend(tracks: Sequence[_Track], top: float) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=look.GREY, label="anonymous", **look.EDGE),
        Patch(facecolor=look.tint(look.GREY), label="file-backed, reclaimable", **look.EDGE),
    ]
    if any(track.table is not None and track.table["shmem_bytes"].any() for track in tracks):
        handles.append(Patch(facecolor="white", hatch="....", label="shared", **look.EDGE))
    limits = [track.result.cell.ram_limit_bytes for track in tracks]
    if any(limit and limit / GIB <= top for limit in limits):
        handles.append(Line2D([], [], color="black", linestyle="--", label="RAM limit"))
    if any(track.result.outcome in _CUT_OFF for track in tracks):
        handles.append(Line2D([], [], marker="X", color="black", linestyle="", label="cut off"))
    return handles


def _caption(frame: pd.DataFrame, results: Sequence[Result], tracks: Sequence[_Track]) -> list[str]:
    lines = [
        captions.shared(frame, results, without=("model", "ram_limit_bytes")),
        "All memory is sampled from outside the worker, and may miss short spikes. Bands: phases between marks.",
    ]
    if frame["repeats"].max() > 1:
        lines[1] += " The first repeat of each."
    if len(tracks) > look.MAX_PANELS:
        lines.append(f"{len(tracks) - look.MAX_PANELS} more panels are not drawn: see samples/.")
    return lines
