"""Draw a run: peaks as bars, and time over peak."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from weighin.records.series import Measured, Row, cells_of, labels_among, varying
from weighin.result import Outcome
from weighin.show import style as look
from weighin.show import words
from weighin.show.report import SCENE, has
from weighin.show.words import KINDS
from weighin.text import one_line
from weighin.units import GIB

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ROWS: Final = 60  # of a panel
_MARGIN: Final = 1.3  # width of the axis / longest bar, so that the outcomes fit right of the bars
_APART: Final = 0.12  # the least distance of two labels above a panel, as a share of its width


def pictures(run: Measured) -> "Mapping[str, Callable[[], Figure]]":
    """Return, by the name of each picture that only needs records, the function that draws it."""
    found: dict[str, Callable[[], Figure]] = {}
    if run.rows:
        found["peaks"] = partial(draw_peaks, run)
    if _compared(run):
        found["time-over-peak"] = partial(draw_front, run)
    return found


def _left_out(panels: int) -> list[str]:
    more = panels - look.MAX_PANELS
    return [f"{more} more panels are not drawn: see summary.csv."] if more > 0 else []


def draw_peaks(run: Measured) -> "Figure":
    """Draw the memory of each strategy as a bar of two sampled maxima, with a marker at the peak."""
    rows, kind = run.rows, words.kind_of(run.rows)
    (held_key, held), (key, name, accuracy) = kind.held, kind.peak
    is_cut = any(row["outcome"] != Outcome.OK for row in rows)
    lines = [
        words.shared(run, without=("model", "ram_limit_bytes")),
        "Bars: the sampled maximum of each part; the parts may peak at different times, and short spikes"
        f" may be missed. Marker and number: {name} ({accuracy}) until {kind.until}.",
    ]
    if is_cut:
        lines.append("Hatched: not ok; the figures are the last readings, not the memory that it needs.")  # fmt: skip
    if any(row["repeats"] > 1 for row in rows):
        lines.append("Medians of the repeats; the line through a marker is their range.")
    scenes = [*words.apart(rows, [name for name in SCENE if name in varying(rows)])]
    lines += _left_out(len(scenes))
    scenes = [(title, group[:_MOST_ROWS]) for title, group in scenes[: look.MAX_PANELS]]
    figure, grid = look.new_figure([(len(group) + 1.6) * 0.42 for _, group in scenes], sharex=True)

    marks = (f"{key}_max", "peak_cuda_allocated_bytes", "model_bytes")
    drawn = [row for _, group in scenes for row in group]
    most = max((row[held_key] or 0) + (row["file_sampled_bytes"] or 0) for row in drawn)
    most = max([most, *(row[mark] or 0 for row in drawn for mark in marks)])
    # A limit above twice the data is only named at the edge, because its line would shorten the bars.
    limits = (row["ram_limit_bytes"] or 0 for row in drawn)
    right = max([most, *(limit for limit in limits if limit <= 2 * most)]) / GIB or 1.0
    for axes, (title, group) in zip(grid, scenes, strict=True):
        label = labels_among(cells_of(group))
        labels = [one_line(label(row["cell"]), look.LABEL_LENGTH) for row in group]
        for place, row in enumerate(group):
            _bar(axes, place, labels[place], row, right)
        axes.set_yticks(range(len(group)), list(map(look.verbatim, labels)))
        axes.set_ylim(len(group) - 0.4, -0.6)
        axes.set_xlim(0, right * _MARGIN)
        look.tidy(axes)
        axes.tick_params(axis="y", length=0, labelsize=9)
        _references(axes, group, right * _MARGIN)
        axes.set_title(look.verbatim(title), fontsize=9, loc="left", pad=18)
    grid[-1].set_xlabel(f"memory of {kind.subject}, GiB", fontsize=9)

    marker: dict[str, Any] = {"linestyle": "", "color": "black", "markersize": 5}
    handles = look.legend(
        (True, f"{held} (sampled)", {"facecolor": look.GREY}),
        (True, f"{kind.cached} (sampled)", {"facecolor": look.tint(look.GREY)}),
        (True, f"{name} ({accuracy})", {"marker": "D", "markerfacecolor": "white", **marker}),
        (is_cut, "not ok", {"facecolor": "white", "hatch": "////"}),
        (has(rows, marks[1]), "CUDA peak, on the GPU (exact)", {"marker": "^", **marker}),
    )
    title = look.headline(rows, f"Peak memory while {words.doing(rows)}")
    look.dress(figure, title, handles, lines)
    return figure


def _bar(axes: "Axes", place: int, label: str, row: Row, right: float) -> None:
    kind, shade = KINDS[row["operation"]], look.colour(row["strategy"])
    is_ok = row["outcome"] == Outcome.OK
    shape: dict[str, Any] = {"height": 0.62, "hatch": "" if is_ok else "////", **look.EDGE}
    anonymous = (row[kind.held[0]] or 0) / GIB
    file_backed = (row["file_sampled_bytes"] or 0) / GIB
    parts: list[Any] = [
        *axes.barh(place, anonymous, color=shade, **shape),
        *axes.barh(place, file_backed, left=anonymous, color=look.tint(shade), **shape),
    ]
    end = anonymous + file_backed
    mark: dict[str, Any] = {"color": "black", "linestyle": "", "markersize": 5, "zorder": 4}
    key, texts = kind.peak[0], [] if is_ok else [words.ending(row)]
    if (peak := row[key]) is not None:
        low, high = row[f"{key}_min"] / GIB, row[f"{key}_max"] / GIB
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        parts += axes.plot(peak / GIB, place, marker="D", mfc="white", **mark)
        texts.insert(0, f"{peak / GIB:.2f}")
        end = max(end, high)
    if (allocated := row["peak_cuda_allocated_bytes"]) is not None:
        parts += axes.plot(allocated / GIB, place, marker="^", **mark)
        end = max(end, allocated / GIB)

    for part in parts:
        look.tip(part, _peak_tip(label, row))
    # The text has a white box, because the line of the RAM limit may cross it.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    at, text = end + right * 0.015, look.verbatim("  ".join(texts))
    axes.text(at, place, text, va="center", fontsize=8, color=look.INK, bbox=box, zorder=5)


def _peak_tip(label: str, row: Row) -> str:
    kind = KINDS[row["operation"]]
    lines = [f"{label}: {words.ending(row)}"]
    for key, name, accuracy in (
        kind.peak,
        ("peak_cgroup_bytes", "cgroup peak", "exact, with page cache"),
        ("peak_cuda_allocated_bytes", "CUDA peak", "exact"),
        (*kind.held, "sampled"),
        ("file_sampled_bytes", kind.cached.partition(",")[0], "sampled"),
    ):
        value, low, high = (row[f"{key}{end}"] for end in ("", "_min", "_max"))
        if value is not None:
            spread = f" ({low / GIB:.3f} to {high / GIB:.3f})" if low != high else ""
            lines.append(f"{name} {value / GIB:.3f}{spread} GiB ({accuracy})")
    return "\n".join(lines)


def _references(axes: "Axes", group: Sequence[Row], edge: float) -> None:
    """Draw lines at the RAM limit, at the import, and at one and two copies of the model above it."""
    limit, model = group[0]["ram_limit_bytes"], words.model_size(group)
    imports = [row["baseline_rss_bytes"] for row in group if row["baseline_rss_bytes"]]
    lines = [(limit, f"RAM limit {words.size(limit)}")] if limit else []
    if model and imports and group[0]["operation"] == "load":
        start = min(imports)
        lines += [(start, "import"), (start + model, f"+ model {model / GIB:.3f} GiB"), (start + 2 * model, "+ 2 models")]  # fmt: skip
    elif model:
        lines.append((model, f"model {model / GIB:.3f} GiB"))
    taken: list[float] = []
    for size, name in lines:
        is_limit, is_far = size == limit, size / GIB > edge
        if is_far and not is_limit:
            continue
        at = min(size / GIB, edge)
        if not is_far:
            style, width = ("--", 1.4) if is_limit else (":", 1)
            axes.axvline(at, color=look.INK, zorder=2.5, linestyle=style, linewidth=width)
        if all(abs(at - other) > _APART * edge for other in taken):
            side = "right" if at > edge * 0.8 else "left"
            text = f"{name} →" if is_far else name
            across = axes.get_xaxis_transform()
            axes.text(at, 1.02, text, ha=side, va="bottom", transform=across, **look.SMALL)
            taken.append(at)


def _compared(run: Measured) -> list[tuple[str, list[Row]]]:
    """Return the panels of time over peak: at least two rows each, whose repeats all ended ok."""
    key, found = words.kind_of(run.rows).peak[0], []
    changing = [name for name in SCENE if name in varying(run.rows)]
    for title, group in words.apart(run.rows, changing):
        good = [one for one in group if one["ok"] == one["repeats"] and one["ready_s"] and one[key]]
        found += [(title, good[:_MOST_ROWS])] if len(good) > 1 else []
    return found


def draw_front(run: Measured) -> "Figure":
    """Draw time over peak, and the Pareto front: the rows than which no other is better in both."""
    scenes = _compared(run)
    drawn, kind = scenes[: look.MAX_PANELS], words.kind_of(run.rows)
    (key, name, accuracy), ready = kind.peak, kind.words["ready"]
    figure, grid = look.new_figure([max(2.8, 0.2 * len(group) + 0.8) for _, group in drawn])
    for axes, (title, group) in zip(grid, drawn, strict=True):
        label = labels_among(cells_of(group))
        points = []
        for row in sorted(group, key=itemgetter(key, "ready_s")):
            text = one_line(label(row["cell"]), look.LABEL_LENGTH)
            points.append((row[key] / GIB, row["ready_s"], text, row))
        front: list[tuple[float, float]] = []
        for x, y, _, _ in points:
            if not front or y < front[-1][1]:
                front.append((x, y))
        axes.step(*zip(*front, strict=True), where="post", color=look.INK, ls="--", linewidth=1)
        top = 1.12 * max(y for _, y, _, _ in points)
        axes.set_xlim(0, 1.08 * points[-1][0])
        axes.set_ylim(0, top)
        # The names stand in a column right of the panel, so far apart that none covers another.
        gap, place = 1.1 / max(14, len(group) + 4), -1.0
        for x, y, text, row in sorted(points, key=itemgetter(1)):
            place, is_front = max(y / top, place + gap), (x, y) in front
            mark = axes.scatter(
                x, y, s=60, color=look.colour(row["strategy"]), edgecolor=look.INK,
                linewidth=2 if is_front else 0.6, zorder=3,
            )  # fmt: skip
            best = "\non the front: no other is better in both" if is_front else ""
            look.tip(mark, f"{text}\n{name} {x:.3f} GiB ({accuracy})\n{ready} in {y:.2f} s{best}")
            axes.annotate(
                look.verbatim(text), (x, y), (1.03, place), textcoords="axes fraction",
                fontsize=8, va="center", color=look.INK, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": "#BBBBBB", "lw": 0.6, "relpos": (0, 0.5)},
            )  # fmt: skip
        axes.set_xlabel(f"{name}, GiB", fontsize=9)
        axes.set_ylabel(f"{ready}, s", fontsize=9)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_title(look.verbatim(title), fontsize=9, loc="left")
        look.tidy(axes)
    lines = [
        "Lower left is better. Dashed: the Pareto front. Only strategies that were ok in all repeats.",
        words.shared(run, without=("model", "ram_limit_bytes")),
        *_left_out(len(scenes)),
    ]
    look.dress(figure, look.headline(run.rows, "Time over peak:"), [], lines)
    return figure
