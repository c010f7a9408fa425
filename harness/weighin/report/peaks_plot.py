"""Draw the memory of each strategy as a bar, with a marker at the strategy's peak RSS.

For a command, the marker is at the memory that the command needs. The two parts of a bar are the
sampled maxima of anonymous and of file-backed memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from weighin.report import captions, operations
from weighin.report import style as look
from weighin.report.rows import Row, has, series
from weighin.result import Outcome, Result
from weighin.units import GIB

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_IN: Final = 0.42
_MARGIN: Final = 1.3  # width of the axis / longest bar, so that the outcomes fit right of the bars


def draw_peaks(results: Sequence[Result]) -> "Figure":
    """Return a drawing of bars, with lines at the RAM limit and at the size of the model."""
    rows = series(results)
    if not rows:
        return look.empty_figure("Memory while loading")
    kind = operations.first_of(rows)
    scenes = list(look.scenes(rows))
    drawn = scenes[: look.MAX_PANELS]
    heights = [len(group) + 1.6 for _, group in drawn]
    figure, grid = look.new_figure(
        sum(heights) * _ROW_IN, len(drawn), 1, height_ratios=heights, sharex=True
    )
    right = max(look.extent_gib(group) for _, group in drawn)
    for axes, (title, group) in zip(grid[:, 0], drawn, strict=True):
        _panel(axes, group, right)
        axes.set_title(look.verbatim(title), fontsize=9, loc="left", pad=18)
    grid[-1, 0].set_xlabel(f"memory of {kind.subject}, GiB", fontsize=9)
    lines = [
        captions.shared(rows, results, without=("model", "ram_limit_bytes")),
        "Bars: the sampled maximum of each part; the parts may peak at different times, and short "
        f"spikes may be missed. Marker and number: {kind.marker} until {kind.until}.",
    ]
    if any(row["outcome"] != Outcome.OK for row in rows):
        lines.append(
            "Hatched: not ok; the figures are the last readings, not the memory that it needs."
        )
    if any(row["repeats"] > 1 for row in rows):
        lines.append("Medians of the repeats; the line through a marker is their range.")
    if len(scenes) > len(drawn):
        lines.append(f"{len(scenes) - len(drawn)} more panels are not drawn: see summary.csv.")
    title = look.headline(rows, f"Peak memory while {captions.doing(rows)}")
    look.dress(figure, title, _legend(rows), lines)
    return figure


def _panel(axes: "Axes", group: Sequence[Row], right: float) -> None:
    labels = [look.verbatim(label) for label in look.row_labels(group)]
    for place, row in enumerate(group):
        _bar(axes, place, row, right)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, right * _MARGIN)
    look.tidy(axes)
    axes.tick_params(axis="y", length=0, labelsize=9)
    _references(axes, group, right)


def _bar(axes: "Axes", place: int, row: Row, right: float) -> None:
    """Draw one bar with its peaks, the range of the peak over repeats, and an outcome other than ok."""
    shade, is_ok = look.colour(row["strategy"]), row["outcome"] == Outcome.OK
    style: dict[str, Any] = {"height": 0.62, "hatch": "" if is_ok else "////", **look.EDGE}
    kind = operations.KINDS[row["operation"]]
    anonymous = (row[kind.held[0]] or 0) / GIB
    file_backed = (row["file_sampled_bytes"] or 0) / GIB
    axes.barh(place, anonymous, color=shade, label="anonymous", **style)
    axes.barh(place, file_backed, left=anonymous, color=look.tint(shade), label="file", **style)
    end = max(anonymous + file_backed, *_marks(axes, place, row))
    peak = row[kind.peak[0]]
    words = [] if peak is None else [f"{peak / GIB:.2f}"]
    words += [] if is_ok else [captions.ending(row)]
    # The text has a white box, because the line of the RAM limit may cross it.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    label = look.verbatim("  ".join(words))
    gap = right * 0.015
    axes.text(
        end + gap, place, label, va="center", fontsize=8, color=look.INK, bbox=box, zorder=5
    )  # fmt: skip


def _marks(axes: "Axes", place: int, row: Row) -> tuple[float, float]:
    """Draw the markers of the peaks; return the highest peak in RAM and that on the GPU, in GiB."""
    rss = cuda = 0.0
    style: dict[str, Any] = {"color": "black", "linestyle": "", "markersize": 5, "zorder": 4}
    key, name = operations.KINDS[row["operation"]].peak
    if (peak := row[key]) is not None:
        low, rss = row[f"{key}_min"] / GIB, row[f"{key}_max"] / GIB
        axes.plot([low, rss], [place, place], color="black", linewidth=1.2, label="range")
        axes.plot(peak / GIB, place, marker="D", mfc="white", label=name, **style)
    if (allocated := row["peak_cuda_allocated_bytes"]) is not None:
        cuda = allocated / GIB
        axes.plot(cuda, place, marker="^", label="CUDA peak", **style)
    return rss, cuda


def _references(axes: "Axes", group: Sequence[Row], right: float) -> None:
    """Draw a line at the size of the model and at the RAM limit, with labels above the panel."""
    limit, model = group[0]["ram_limit_bytes"], captions.model_size(group)
    across = axes.get_xaxis_transform()
    style: dict[str, Any] = {"transform": across, "va": "bottom", "fontsize": 8, "color": look.INK}
    if model:
        axes.axvline(model / GIB, color=look.INK, linestyle=":", linewidth=1.2, zorder=2.5)
        side = "left" if limit and limit < model else "right"
        axes.text(model / GIB, 1.02, f"model {model / GIB:.3f} GiB", ha=side, **style)
    if limit and limit / GIB <= right * _MARGIN:
        axes.axvline(limit / GIB, color="black", linestyle="--", linewidth=1.4, zorder=3)
        side = "right" if model and limit < model else "left"
        axes.text(limit / GIB, 1.02, f"RAM limit {captions.size(limit)}", ha=side, **style)
    elif limit:
        axes.text(right * _MARGIN, 1.02, f"RAM limit {captions.size(limit)} →", ha="right", **style)


def _legend(rows: Sequence[Row]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marker: dict[str, Any] = {"linestyle": "", "color": "black", "markersize": 5}
    kind = operations.first_of(rows)
    peak = f"{kind.peak[1]} ({kind.peak_accuracy})"
    handles: list[Any] = [
        Patch(facecolor=look.GREY, label=f"{kind.held[1]} (sampled)", **look.EDGE),
        Patch(facecolor=look.tint(look.GREY), label=f"{kind.cached} (sampled)", **look.EDGE),
        Line2D([], [], marker="D", markerfacecolor="white", label=peak, **marker),
    ]
    if any(row["outcome"] != Outcome.OK for row in rows):
        handles.append(Patch(facecolor="white", hatch="////", label="not ok", **look.EDGE))
    if has(rows, "peak_cuda_allocated_bytes"):
        handles.append(Line2D([], [], marker="^", label="CUDA peak, on the GPU (exact)", **marker))
    return handles
