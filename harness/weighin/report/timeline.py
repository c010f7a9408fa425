"""Draw resident memory over time, in a panel for each measurement; all panels have equal axes."""

import textwrap
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.report import captions, operations
from weighin.report import style as look
from weighin.report import timeline_data as data
from weighin.report.commands import stacks_at_peak
from weighin.report.rows import Row, series
from weighin.result import Outcome, Result
from weighin.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEADROOM: Final = 1.4  # height of the axis / highest memory, so that the names of phases fit above
_POINTS: Final = 400  # about the width of a panel in pixels; more points only enlarge the SVG
_SHARED: Final = "shmem_bytes"
_KERNEL: Final = "kernel_bytes"
_DOTS: Final = ".."  # 45 KiB in an SVG, which contains each dot; "...." would take 180 KiB
_LEAST_APART: Final = 0.03  # between the texts of two marked lines, as a share of the panel's width
_MARK_LENGTH: Final = 28
_CHARACTER: Final = 0.0145  # width of a letter, as a share of the panel's width


def draw_timeline(run: Path, results: Sequence[Result]) -> "Figure":
    """Return a picture of RSS over time, with the phases, for the first repeat of each measurement.

    If the samples of a measurement cannot be read, its panel shows the words "no samples".
    """
    if not results:
        return look.empty_figure("Memory over time while loading")
    rows = series(results)
    tracks = data.choose(run, results, rows)
    drawn = tracks[: look.MAX_PANELS]
    columns = min(2, len(drawn))
    lines = -(-len(drawn) // columns)
    figure, grid = look.new_figure(lines * 2.2 + 0.2, lines, columns, sharex=True, sharey=True)
    span, top = data.longest(drawn), data.highest(drawn)
    for axes, track in zip(grid.flat, drawn, strict=False):
        axes.set_xlim(0, span)
        axes.set_ylim(0, top * _HEADROOM)
        _panel(axes, track, span)
    for axes in grid.flat[len(drawn) :]:
        axes.axis("off")
    kind = operations.first_of(rows)
    for axes in grid[:, 0]:
        axes.set_ylabel(kind.axis, fontsize=9)
    for axes in grid.flat[max(0, len(drawn) - columns) : len(drawn)]:
        axes.tick_params(labelbottom=True)  # also above an empty panel
    for axes in grid.flat[(lines - 1) * columns : len(drawn)]:
        axes.set_xlabel(f"time since {kind.zero}, s", fontsize=9)
    title = look.headline(rows, f"Memory over time while {captions.doing(rows)}")
    handles = _legend(drawn, top * _HEADROOM, kind.cached)
    look.dress(figure, title, handles, _caption(rows, results, tracks))
    return figure


def _panel(axes: "Axes", track: data.Track, span: float) -> None:
    look.tidy(axes)
    axes.set_title(
        look.verbatim(f"{track.label}: {track.result.outcome}"), fontsize=9, loc="left", pad=13
    )
    _limit(axes, track.result.cell.ram_limit_bytes)
    if not track.samples:
        why = "not run" if track.result.outcome is Outcome.SKIPPED else "no samples"
        axes.text(0.5, 0.4, why, transform=axes.transAxes, ha="center", fontsize=9, color=look.INK)
        if not track.end_s:
            return
    else:
        _areas(axes, track)
    if track.gpu:
        _gpu_line(axes, track)
    _phases(axes, track, span)
    _marks(axes, track, span)
    if track.result.outcome in data.CUT_OFF:
        _cut(axes, track, span)


def _limit(axes: "Axes", limit: int | None) -> None:
    """Draw the RAM limit as a line, or write its value if the limit is above the axis."""
    if limit and limit / GIB <= axes.get_ylim()[1]:
        axes.axhline(limit / GIB, color="black", linestyle="--", linewidth=1.2, zorder=3)
    elif limit:
        note = f"RAM limit {captions.size(limit)} ↑"
        axes.annotate(note, (0.99, 0.86), xycoords="axes fraction", ha="right", fontsize=7)


def _areas(axes: "Axes", track: data.Track) -> None:
    """Draw anonymous, file-backed, shared and kernel memory as stacked areas."""
    points = data.thin(track.samples, _POINTS)
    seconds = [(point.t_ns - track.zero_ns) / 1e9 for point in points]
    shade = look.colour(track.result.cell.strategy)
    shades_of = (shade, look.tint(shade), "white", look.GREY)
    fills: dict[str, Any] = dict(zip(data.PARTS, shades_of, strict=True))
    # An area that is always zero is left out, because an SVG would contain each of its points.
    parts = [name for name in data.PARTS if name == data.PARTS[0] or data.has_part(points, name)]
    layers = [[(getattr(point, name) or 0) / GIB for point in points] for name in parts]
    colours, labels = [fills[name] for name in parts], list(parts)
    total = [sum(heights) for heights in zip(*layers, strict=True)]
    if track.ranks:  # an area of anonymous memory for each rank, alternately in two shades
        by_rank = [
            [size / GIB for size in layer] for layer in data.anonymous_by_rank(track, points)
        ]
        shades = [shade if number % 2 == 0 else look.tint(shade) for number in range(len(by_rank))]
        layers, parts = [*by_rank, *layers[1:]], [*[data.PARTS[0]] * len(by_rank), *parts[1:]]
        colours, labels = [*shades, *["#DDDDDD" for _ in colours[1:]]], list(parts)
    drawn = axes.stackplot(seconds, *layers, colors=colours, labels=labels)
    if _SHARED in parts:
        drawn[parts.index(_SHARED)].set_hatch(_DOTS)
    if _KERNEL in parts:
        drawn[parts.index(_KERNEL)].set_hatch("//")
    axes.plot(seconds, total, color=look.INK, linewidth=0.8)


def _gpu_line(axes: "Axes", track: data.Track) -> None:
    points = data.thin(track.gpu, _POINTS, itemgetter(1))
    seconds = [(t_ns - track.zero_ns) / 1e9 for t_ns, _ in points]
    style: dict[str, Any] = {"color": "black", "linewidth": 1, "zorder": 3, "label": "GPU"}
    axes.step(seconds, [used / GIB for _, used in points], where="post", **style)


def _phases(axes: "Axes", track: data.Track, span: float) -> None:
    """Shade every second phase; name long phases inside the panel, and short phases above it."""
    short = []
    style: dict[str, Any] = {
        "transform": axes.get_xaxis_transform(),
        "va": "top",
        "fontsize": 7,
        "color": look.INK,
    }
    for index, (name, start, end) in enumerate(data.spans(track)):
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


def _marks(axes: "Axes", track: data.Track, span: float) -> None:
    """Draw a vertical line at the time of each output line that --mark selected; add text if it fits."""
    written_s = -span
    for at_s, text in data.marks(track):
        if at_s > span:
            break
        axes.axvline(at_s, color=look.INK, linestyle=":", linewidth=0.8, zorder=2.5)
        if at_s - written_s >= _LEAST_APART * span:
            words = look.verbatim(textwrap.shorten(text, _MARK_LENGTH, placeholder="…"))
            axes.annotate(
                words, (at_s, 0.86), xycoords=("data", "axes fraction"), xytext=(1, 0),
                textcoords="offset points", rotation=90, va="top", fontsize=6, color=look.INK,
            )  # fmt: skip
            written_s = at_s


def _cut(axes: "Axes", track: data.Track, span: float) -> None:
    """Mark the time at which the measurement was cut off, with its outcome."""
    outcome = track.result.outcome
    if track.end_s > span:
        axes.annotate(
            f"{outcome} at {track.end_s:.0f} s →",
            (0.99, 0.72),
            xycoords="axes fraction",
            ha="right",
            fontsize=8,
        )
        return
    end_s, height = data.cut_at(track)
    axes.plot(end_s, height, "X", color="black", markersize=9, zorder=5, label="cut off")
    place = track.result.last_phase or ("" if track.result.ran else "no phase")
    side = "right" if end_s > span / 2 else "left"
    axes.annotate(
        look.verbatim(f"{outcome} in {place}" if place else str(outcome)),
        (end_s, height), xytext=(-7 if side == "right" else 7, 4),
        textcoords="offset points", ha=side, va="bottom", fontsize=8,
    )  # fmt: skip


def _legend(tracks: Sequence[data.Track], top: float, cached: str) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=look.GREY, label="anonymous", **look.EDGE),
        Patch(facecolor=look.tint(look.GREY), label=cached, **look.EDGE),
    ]
    if any(data.has_part(track.samples, _SHARED) for track in tracks):
        handles.append(Patch(facecolor="white", hatch=_DOTS, label="shared", **look.EDGE))
    if any(data.has_part(track.samples, _KERNEL) for track in tracks):
        handles.append(Patch(facecolor=look.GREY, hatch="//", label="kernel", **look.EDGE))
    if any(track.gpu for track in tracks):
        handles.append(Line2D([], [], color="black", linewidth=1, label="on the GPU"))
    if any(data.marks(track) for track in tracks):
        handles.append(Line2D([], [], color=look.INK, linestyle=":", label="line of output"))
    limits = [track.result.cell.ram_limit_bytes for track in tracks]
    if any(limit and limit / GIB <= top for limit in limits):
        handles.append(Line2D([], [], color="black", linestyle="--", label="RAM limit"))
    if any(track.result.outcome in data.CUT_OFF for track in tracks):
        handles.append(Line2D([], [], marker="X", color="black", linestyle="", label="cut off"))
    return handles


def _caption(
    rows: Sequence[Row], results: Sequence[Result], tracks: Sequence[data.Track]
) -> list[str]:
    lines = [
        captions.shared(rows, results, without=("model", "ram_limit_bytes")),
        f"All memory is sampled from outside {operations.first_of(rows).outside}; short spikes may be"
        " missed. Bands: phases.",
        *_stacks(tracks),
    ]
    if any(track.ranks for track in tracks):
        lines.append(
            "Of several ranks: the anonymous memory of each rank, in two shades in turn; above it in grey,"
            " file-backed and shared memory, counted once. Bands: the phases of rank 0."
        )
    if any(track.gpu for track in tracks):
        lines.append("On the GPU: allocated bytes, sampled.")
    if any(row["repeats"] > 1 for row in rows):
        lines[1] += " The first repeat of each."
    if len(tracks) > look.MAX_PANELS:
        lines.append(f"{len(tracks) - look.MAX_PANELS} more panels are not drawn: see samples/.")
    return lines


def _stacks(tracks: Sequence[data.Track]) -> list[str]:
    """Return a line of text for each command: the innermost Python frame at its memory peak."""
    lines = []
    for track in tracks:
        if stacks := stacks_at_peak(track.result):
            usage, frame = format_bytes(stacks[0].usage_bytes, digits=1), stacks[0].frames[0]
            lines.append(f"Stack of {track.label}, at {usage}: {frame}.")
    return lines
