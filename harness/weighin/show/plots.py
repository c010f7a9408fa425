"""Draw a run: peaks as bars, time over peak, survival, and curves over limits, ranks and disks.

Each function returns a matplotlib figure, whose marks have tips.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from weighin.records.metrics import grouped
from weighin.records.run import Measured, Row, cells_of, has, varying
from weighin.records.series import Matrix, labels_among
from weighin.records.verdict import Typical, Verdict, refaults
from weighin.result import Outcome, Result
from weighin.show import findings, words
from weighin.show import style as look
from weighin.show.findings import (
    NOTE_DISKS,
    NOTE_RANKS,
    RULE_RANKS,
    disk_of,
    disk_words,
    first_pass_ns,
    survival_caption,
    survival_notes,
)
from weighin.show.report import SCENE
from weighin.show.words import KINDS
from weighin.text import one_line
from weighin.units import GIB, format_latency, format_rate, format_seconds

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_IN: Final = 0.42
_MOST_ROWS: Final = 60  # of a panel
_MARGIN: Final = 1.3  # width of the axis / longest bar, so that the outcomes fit right of the bars
_APART: Final = 0.12  # the least distance of two labels above a panel, as a share of its width
# Light forms of Okabe and Ito's colours, which colour-blind readers can tell apart.
FILLS: Final = {Verdict.SURVIVES: "#BFE5D8", Verdict.THRASHES: "#F7D488", Verdict.KILLED: "#EDB9A0"}
_UNJUDGED: Final = "#F2F2F2"
_BY: Final = ("rate", "latency")


def pictures(run: Measured) -> "Mapping[str, Callable[[], Figure]]":
    """Return, by the name of each picture that only needs records, the function that draws it."""
    found: dict[str, Callable[[], Figure]] = {}
    if run.ranks:
        found["ranks"] = partial(draw_ranks, run)
    for over, by in enumerate(_BY):
        if len({disk_of(result)[over] for result in run.results} - {None}) > 1:
            found[f"time-over-disk-{by}"] = partial(draw_disks, run, over)
    if run.matrices and not run.has_floors:
        found["survival"] = partial(draw_survival, run)
        found["time-over-limit"] = partial(draw_times, run)
    if run.rows:
        found["peaks"] = partial(draw_peaks, run)
    if any(_compared(group) for _, group in _scenes(run.rows)):
        found["time-over-peak"] = partial(draw_front, run)
    return found


def _scenes(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the title and the first 60 rows of each group of comparable rows."""
    changing = varying(rows)
    scenes = words.apart(rows, [name for name in SCENE if name in changing])
    return [(title, group[:_MOST_ROWS]) for title, group in scenes]


def _labelled(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    label = labels_among(cells_of(rows))
    return [(one_line(label(row["cell"]), look.LABEL_LENGTH), row) for row in rows]


def draw_peaks(run: Measured) -> "Figure":
    """Draw the memory of each strategy as a bar of two sampled maxima, with a marker at the peak."""
    rows = run.rows
    kind = words.kind_of(rows)
    scenes = _scenes(rows)
    drawn = scenes[: look.MAX_PANELS]
    heights = [len(group) + 1.6 for _, group in drawn]
    figure, grid = look.new_figure(
        sum(heights) * _ROW_IN, len(drawn), 1, height_ratios=heights, sharex=True
    )
    right = max(_extent_gib(group) for _, group in drawn)
    for axes, (title, group) in zip(grid[:, 0], drawn, strict=True):
        labelled = _labelled(group)
        for place, (label, row) in enumerate(labelled):
            _bar(axes, place, label, row, right)
        axes.set_yticks(range(len(group)), [look.verbatim(label) for label, _ in labelled])
        axes.set_ylim(len(group) - 0.4, -0.6)
        axes.set_xlim(0, right * _MARGIN)
        look.tidy(axes)
        axes.tick_params(axis="y", length=0, labelsize=9)
        _references(axes, group, right)
        axes.set_title(look.verbatim(title), fontsize=9, loc="left", pad=18)
    grid[-1, 0].set_xlabel(f"memory of {kind.subject}, GiB", fontsize=9)
    lines = [
        words.shared(run, without=("model", "ram_limit_bytes")),
        "Bars: the sampled maximum of each part; the parts may peak at different times, and short spikes"
        f" may be missed. Marker and number: {kind.peak[1]} ({kind.peak[2]}) until {kind.until}.",
    ]
    if any(row["outcome"] != Outcome.OK for row in rows):
        lines.append(
            "Hatched: not ok; the figures are the last readings, not the memory that it needs."
        )
    if any(row["repeats"] > 1 for row in rows):
        lines.append("Medians of the repeats; the line through a marker is their range.")
    lines += _left_out(len(scenes))
    title = look.headline(rows, f"Peak memory while {words.doing(rows)}")
    look.dress(figure, title, _legend(rows), lines)
    return figure


def _left_out(panels: int) -> list[str]:
    more = panels - look.MAX_PANELS
    return [f"{more} more panels are not drawn: see summary.csv."] if more > 0 else []


def _extent_gib(group: Sequence[Row]) -> float:
    """Return the largest memory in GiB that the axis of a panel must show."""
    kind = words.kind_of(group)
    marks = (f"{kind.peak[0]}_max", "peak_cuda_allocated_bytes", "model_bytes")
    bars = ((row[kind.held[0]] or 0) + (row["file_sampled_bytes"] or 0) for row in group)
    data: int = max(*bars, *(row[name] or 0 for row in group for name in marks))
    limit: int = group[0]["ram_limit_bytes"] or 0
    # A limit above twice the data is only named at the edge, because its line would shorten the bars.
    return max(data, limit if limit <= 2 * data else 0) / GIB or 1.0


def _bar(axes: "Axes", place: int, label: str, row: Row, right: float) -> None:
    """Draw one bar with its peaks, the range of the peak over repeats, and an outcome other than ok."""
    kind, shade = KINDS[row["operation"]], look.colour(row["strategy"])
    is_ok = row["outcome"] == Outcome.OK
    shape: dict[str, Any] = {"height": 0.62, "hatch": "" if is_ok else "////", **look.EDGE}
    anonymous = (row[kind.held[0]] or 0) / GIB
    file_backed = (row["file_sampled_bytes"] or 0) / GIB
    parts = [
        *axes.barh(place, anonymous, color=shade, label="anonymous", **shape),
        *axes.barh(
            place, file_backed, left=anonymous, color=look.tint(shade), label="file", **shape
        ),
    ]
    ends = [anonymous + file_backed]
    mark: dict[str, Any] = {"color": "black", "linestyle": "", "markersize": 5, "zorder": 4}
    key, name, _ = kind.peak
    if (peak := row[key]) is not None:
        low, high = row[f"{key}_min"] / GIB, row[f"{key}_max"] / GIB
        ends.append(high)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2, label="range")
        parts += axes.plot(peak / GIB, place, marker="D", mfc="white", label=name, **mark)
    if (allocated := row["peak_cuda_allocated_bytes"]) is not None:
        ends.append(allocated / GIB)
        parts += axes.plot(allocated / GIB, place, marker="^", label="CUDA peak", **mark)
    for part in parts:
        look.tip(part, _peak_tip(label, row))
    texts = [] if peak is None else [f"{peak / GIB:.2f}"]
    texts += [] if is_ok else [words.ending(row)]
    # The text has a white box, because the line of the RAM limit may cross it.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(
        max(ends) + right * 0.015, place, look.verbatim("  ".join(texts)), va="center", fontsize=8,
        color=look.INK, bbox=box, zorder=5,
    )  # fmt: skip


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


def _references(axes: "Axes", group: Sequence[Row], right: float) -> None:
    """Draw lines at the import, at one and two copies of the model above it, and at the RAM limit."""
    limit, model = group[0]["ram_limit_bytes"], words.model_size(group)
    imports = [row["baseline_rss_bytes"] for row in group if row["baseline_rss_bytes"]]
    lines: list[tuple[float, str, str]] = []
    if model and imports and group[0]["operation"] == "load":
        start = min(imports)
        lines = [(start, "import", ":"), (start + model, f"+ model {model / GIB:.3f} GiB", ":"),
                 (start + 2 * model, "+ 2 models", ":")]  # fmt: skip
    elif model:
        lines = [(model, f"model {model / GIB:.3f} GiB", ":")]
    edge = right * _MARGIN
    across = axes.get_xaxis_transform()
    text: dict[str, Any] = {"transform": across, "va": "bottom", "fontsize": 7.5, "color": look.INK}
    taken: list[float] = []
    if limit:
        at, is_far = min(limit / GIB, edge), limit / GIB > edge
        name = f"RAM limit {words.size(limit)}{' →' if is_far else ''}"
        axes.text(at, 1.02, name, ha="right" if is_far or at > edge * 0.8 else "left", **text)
        taken.append(at)
        if not is_far:
            axes.axvline(at, color="black", linestyle="--", linewidth=1.4, zorder=3)
    for size, name, dashes in lines:
        if (at := size / GIB) > edge:
            continue
        axes.axvline(at, color=look.INK, linestyle=dashes, linewidth=1, zorder=2.5)
        if all(abs(at - other) > _APART * edge for other in taken):
            axes.text(at, 1.02, name, ha="right" if at > edge * 0.8 else "left", **text)
            taken.append(at)


def _legend(rows: Sequence[Row]) -> list[Any]:
    kind = words.kind_of(rows)
    _, name, accuracy = kind.peak
    marker: dict[str, Any] = {"linestyle": "", "color": "black", "markersize": 5}
    not_ok = any(row["outcome"] != Outcome.OK for row in rows)
    on_gpu = has(rows, "peak_cuda_allocated_bytes")
    return look.legend(
        (True, f"{kind.held[1]} (sampled)", {"facecolor": look.GREY}),
        (True, f"{kind.cached} (sampled)", {"facecolor": look.tint(look.GREY)}),
        (True, f"{name} ({accuracy})", {"marker": "D", "markerfacecolor": "white", **marker}),
        (not_ok, "not ok", {"facecolor": "white", "hatch": "////"}),
        (on_gpu, "CUDA peak, on the GPU (exact)", {"marker": "^", **marker}),
    )


def _compared(group: Sequence[Row]) -> list[Row]:
    """Return the rows that a plot of time over peak shows: at least two, whose repeats all ended ok."""
    key = words.kind_of(group).peak[0]
    good = [
        row
        for row in group
        if row["ok"] == row["repeats"] and row["ready_s"] is not None and row[key]
    ]
    return good if len(good) > 1 else []


def draw_front(run: Measured) -> "Figure":
    """Draw time over peak, with the Pareto front: no other row is better than these in both."""
    scenes = [(title, good) for title, group in _scenes(run.rows) if (good := _compared(group))]
    drawn = scenes[: look.MAX_PANELS]
    heights = [max(2.8, 0.2 * len(group) + 0.8) for _, group in drawn]
    figure, grid = look.new_figure(sum(heights), len(drawn), 1, height_ratios=heights)
    kind = words.kind_of(run.rows)
    for axes, (title, group) in zip(grid[:, 0], drawn, strict=True):
        points = [
            (row[kind.peak[0]] / GIB, row["ready_s"], name, row) for name, row in _labelled(group)
        ]
        front: list[tuple[float, float]] = []
        for x, y in sorted({(x, y) for x, y, _, _ in points}):
            if not front or y < front[-1][1]:
                front.append((x, y))
        top = 1.12 * max(y for _, y, _, _ in points)
        axes.set_xlim(0, 1.08 * max(x for x, _, _, _ in points))
        axes.set_ylim(0, top)
        axes.step(
            [x for x, _ in front], [y for _, y in front], where="post", color=look.INK,
            linestyle="--", linewidth=1, label="front",
        )  # fmt: skip
        # The names stand in a column right of the panel, so far apart that none covers another.
        places = _spread([y / top for _, y, _, _ in points], 0.2 / heights[0] * 1.1)
        for (x, y, name, row), place in zip(points, places, strict=True):
            is_front = (x, y) in front
            (mark,) = axes.plot(
                x, y, "o", color=look.colour(row["strategy"]), markersize=8,
                markeredgecolor=look.INK, markeredgewidth=2 if is_front else 0.6,
            )  # fmt: skip
            best = "\non the front: no other is better in both" if is_front else ""
            look.tip(mark, f"{name}\n{kind.peak[1]} {x:.3f} GiB ({kind.peak[2]})\n{kind.words['ready']} in {y:.2f} s{best}")  # fmt: skip
            axes.annotate(
                look.verbatim(name), (x, y), xytext=(1.03, place), textcoords="axes fraction",
                fontsize=8, va="center", color=look.INK, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": "#BBBBBB", "linewidth": 0.6},
            )  # fmt: skip
        look.frame_curves(axes, f"{kind.peak[1]}, GiB", f"{kind.words['ready']}, s")
        axes.set_title(look.verbatim(title), fontsize=9, loc="left")
    lines = [
        "Lower left is better. Dashed: the Pareto front. Only strategies that were ok in all repeats.",
        words.shared(run, without=("model", "ram_limit_bytes")),
        *_left_out(len(scenes)),
    ]
    look.dress(figure, look.headline(run.rows, "Time over peak:"), [], lines)
    return figure


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Return the places moved up so far that no two are closer than ``gap``."""
    moved, last = dict.fromkeys(range(len(places)), 0.0), -gap
    for at in sorted(moved, key=places.__getitem__):
        last = moved[at] = max(places[at], last + gap)
    return list(moved.values())


def draw_survival(run: Measured) -> "Figure":
    """Draw a field for each strategy and RAM limit, coloured by the verdict."""
    from matplotlib.patches import Rectangle

    drawn = run.matrices[: look.MAX_PANELS]
    heights = [0.55 * len(matrix.rows) + 0.7 for matrix in drawn]
    figure, grid = look.new_figure(sum(heights), len(drawn), 1, height_ratios=heights)
    for axes, matrix in zip(grid[:, 0], drawn, strict=True):
        columns, rows = len(matrix.limits), len(matrix.rows)
        for row in range(rows):
            for column in range(columns):
                field = matrix.fields.get((row, column))
                fill = FILLS[field.judgement.verdict] if field and field.judgement else _UNJUDGED
                axes.add_patch(
                    Rectangle((column, row), 1, 1, facecolor=fill, edgecolor="white", linewidth=2)
                )
                above, below = field_words(field)
                text: dict[str, Any] = {"ha": "center", "va": "center", "color": look.INK}
                axes.text(column + 0.5, row + (0.32 if below else 0.5), above, fontsize=9, **text)
                axes.text(column + 0.5, row + 0.72, below, fontsize=6.5, linespacing=1.0, **text)
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.set_xticks([n + 0.5 for n in range(columns)], list(map(words.limit, matrix.limits)))
        axes.set_yticks([n + 0.5 for n in range(rows)], list(map(look.verbatim, matrix.labels)))
        axes.xaxis.tick_top()
        axes.tick_params(length=0, labelsize=9, colors=look.INK)
        axes.spines[:].set_visible(False)
        for column, below in _limits_below(matrix):
            axes.axvline(column, color="black", linewidth=1.6, linestyle="--")
            axes.text(column, rows + 0.08, below, fontsize=8, va="top", color=look.INK)
    first = drawn[0]
    kind = KINDS[first.scene.operation]
    time, rule = survival_notes(run)
    if first.model_bytes:
        rule += " 1x reread: the bytes read again equal the size of the model."
    meant = {
        Verdict.SURVIVES: "survives",
        Verdict.THRASHES: f"thrashes: {kind.words['thrashes']}",
        Verdict.KILLED: "killed for lack of memory",
    }
    handles = look.legend(*((True, text, {"facecolor": FILLS[one]}) for one, text in meant.items()))
    title = f"Which {kind.words['several']} survive which RAM limit? {_model(first)}"
    look.dress(figure, title, handles, [time, rule, survival_caption(run, first)])
    return figure


def _limits_below(matrix: Matrix) -> Iterator[tuple[int, str]]:
    """Yield the column of the largest RAM limit below the model's size, and a text that says so."""
    size = matrix.model_bytes
    for column, (left, right) in enumerate(pairwise(matrix.limits), start=1):
        if size and right is not None and right < size <= (left or float("inf")):
            yield column, f" limit below the model's {size / GIB:.2f} GiB →"


def field_words(field: Typical | None) -> tuple[str, str]:
    """Return two lines of text for a field, such as "2.31 s" and "1.4x reread" (of the model's size)."""
    if field is None:
        return "-", ""
    result, verdict = field.result, field.judgement and field.judgement.verdict
    if verdict is Verdict.KILLED:
        return "killed", f"in {result.last_phase}" if result.last_phase else ""
    if field.spent_ns is None:
        return str(result.outcome), "thrashes" if verdict is Verdict.THRASHES else ""
    time, pages, again = format_seconds(field.spent_ns), refaults(result), ""
    if pages is not None and result.model_bytes:
        again = f"{pages * result.page_bytes / result.model_bytes:.1f}x"
    if verdict is Verdict.THRASHES:
        return time, f"thrashes\n{again} reread" if again else "thrashes"
    return time, f"{again} reread" if again and again != "0.0x" else ""


def draw_times(run: Measured) -> "Figure":
    """Draw each strategy's time over RAM limits; an x marks the first failure."""
    drawn = run.matrices[: look.MAX_PANELS]
    panels: list[look.Panel] = []
    for matrix in drawn:
        curves: dict[str, look.Curve] = {}
        for (row, column), field in sorted(matrix.fields.items(), key=lambda one: one[0]):
            name, limit = matrix.labels[row], words.limit(matrix.limits[column])
            _, points = curves.setdefault(name, (matrix.rows[row].strategy, []))
            if field.spent_ns:
                is_slow = field.judgement and field.judgement.verdict is Verdict.THRASHES
                tip = f"{name}, {limit}: {field.words}"
                points.append((column, field.spent_ns / 1e9, "^" if is_slow else "o", tip))
        panels.append(("", curves))
    figure, grid, handles = look.draw_curves(panels, "RAM limit", "time, s", log_seconds=True)
    for axes, matrix, (_, curves) in zip(grid, drawn, panels, strict=True):
        columns = len(matrix.limits)
        for strategy, points in curves.values():
            if points and points[-1][0] + 1 < columns:
                (x, y, *_), shade = points[-1], look.colour(strategy)
                axes.plot([x, x + 1], [y, y], color=shade, linewidth=1, linestyle=":")
                axes.plot(x + 1, y, color=shade, marker="x", markersize=7, markeredgewidth=2)
        axes.set_xticks(range(columns), list(map(words.limit, matrix.limits)))
        axes.set_xlim(-0.3, columns - 0.7)
        for column, below in _limits_below(matrix):
            axes.axvline(column - 0.5, color="black", linewidth=1.2, linestyle="--", zorder=0)
            across = axes.get_xaxis_transform()
            axes.text(column - 0.5, 1.01, below, transform=across, fontsize=8, color=look.INK)
    signs = look.legend(
        (True, "survives", {"linestyle": "", "marker": "o", "markersize": 5}),
        (True, "thrashes", {"linestyle": "", "marker": "^", "markersize": 5}),
        (True, "killed", {"linestyle": "", "marker": "x", "markersize": 7, "markeredgewidth": 2}),
    )
    lines = [*survival_notes(run), survival_caption(run, drawn[0])]
    title = f"Time under lower RAM limits: {_model(drawn[0])}"
    look.dress(figure, title, [*handles, *signs], lines)
    return figure


def _model(matrix: Matrix) -> str:
    return words.dimension("model", matrix.scene.model.title, matrix.model_bytes)


def draw_ranks(run: Measured) -> "Figure":
    """Draw the memory of all ranks together over the number of ranks."""
    by_group = findings.names(run.rows, without=["ranks"])
    named = {replace(row["cell"], ranks=1).series: by_group[row["group"]] for row in run.rows}
    curves: dict[str, look.Curve] = {
        named[each.cell.series]: (
            each.cell.strategy,
            [(n, size / (each.model_bytes or GIB)) for n, size in each.charges.items()],
        )
        for each in run.ranks
    }
    up = "all ranks above the imports, x model"
    figure, (axes,), handles = look.draw_curves([("", curves)], "ranks", up)
    numbers = sorted({number for each in run.ranks for number in each.charges})
    axes.plot(numbers, numbers, color=look.GREY, linestyle=":", linewidth=1)
    if numbers:
        axes.annotate(
            "one copy in each rank", (numbers[-1], numbers[-1]), xytext=(-4, 4), ha="right",
            textcoords="offset points", fontsize=7, color=look.INK,
        )  # fmt: skip
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    lines = [f"{NOTE_RANKS} {RULE_RANKS}", words.shared(run)]
    look.dress(figure, look.headline(run.rows, "Memory over the number of ranks:"), handles, lines)
    return figure


def draw_disks(run: Measured, over: int) -> "Figure":
    """Draw the times over the rates (``over`` = 0) or the latencies (``over`` = 1) of the disks.

    Each scene has a panel for each latency (``over`` = 0) or for each rate (``over`` = 1).
    """
    changing = [n for n in varying(run.rows) if n in SCENE and n not in ("disk", "disk_latency")]
    label = labels_among([result.cell for result in run.results])
    panels: list[look.Panel] = []
    measured: list[list[Result]] = []  # of each panel
    for title, rows in words.apart(run.rows, changing):
        ours = [result for row in rows for result in run.by_series[row["group"]]]
        by_other = grouped(ours, lambda one: disk_of(one)[1 - over])
        for other, same in sorted(by_other.items(), key=lambda one: one[0] or 0):
            curves: dict[str, look.Curve] = {}
            for name, results in grouped(same, lambda one: label(one.cell)).items():
                times = {
                    value: first_pass_ns(repeats)
                    for value, repeats in grouped(results, lambda one: disk_of(one)[over]).items()
                    if value is not None
                }
                points = [
                    (value, ns / 1e9) for value, ns in sorted(times.items()) if ns is not None
                ]
                curves[name] = (results[0].cell.strategy, points)
            fixed = f"{_BY[1 - over]} {disk_words((None, other) if over == 0 else (other, None))}"
            panels.append((" · ".join(filter(None, [title, fixed])), curves))
            measured.append(same)
    figure, grid, handles = look.draw_curves(
        panels, f"disk's {_BY[over]}", "ready + first pass, s", log_seconds=True
    )
    for axes, results in zip(grid, measured, strict=False):
        values = sorted({value for one in results if (value := disk_of(one)[over]) is not None})
        size = next((one.model_bytes for one in results if one.model_bytes), None)
        if over == 0 and size:
            axes.plot(values, [size / value for value in values], ":", color=look.GREY, linewidth=1)
        axes.set_xscale("log")
        axes.set_xticks(values, [(format_rate, format_latency)[over](value) for value in values])
        axes.minorticks_off()
    dotted = " Dotted: the model's size divided by the rate." if over == 0 else ""
    lines = [f"{NOTE_DISKS}{dotted}", words.shared(run), *_left_out(len(panels))]
    title = look.headline(run.rows, f"Ready + first pass over the disk's {_BY[over]}:")
    look.dress(figure, title, handles, lines)
    return figure


def draw_history(
    title: str,
    curves: "Mapping[str, look.Curve]",
    runs: Sequence[str],
    up: str,
    changed: Sequence[str],
    notes: Sequence[str],
) -> "Figure":
    """Draw a metric over ``runs``, of up to 12 series; a dotted line precedes each run in ``changed``."""
    drawn = dict([*curves.items()][: look.MAX_PANELS])
    figure, (axes,), handles = look.draw_curves([("", drawn)], "run", up)
    for place in (at for at, run in enumerate(runs) if run in changed):
        axes.axvline(place - 0.5, color=look.INK, linestyle=":", linewidth=1)
    places = range(0, len(runs), max(1, len(runs) // 12))
    axes.set_xticks(places, [runs[at] for at in places], fontsize=6.5, rotation=30, ha="right")
    look.dress(figure, title, handles, notes)
    return figure
