"""Draw which strategy survives which RAM limit, and the time of each strategy over the RAM limit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from weighin.records.series import Matrix, matrices
from weighin.records.verdict import Typical, Verdict, refaults
from weighin.report import captions
from weighin.report import style as look
from weighin.report.survival import caption, heading, kind_of, notes
from weighin.result import Result
from weighin.units import GIB, format_seconds

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Light forms of Okabe and Ito's colours, which colour-blind readers can tell apart.
FILLS: Final = {Verdict.SURVIVES: "#BFE5D8", Verdict.THRASHES: "#F7D488", Verdict.KILLED: "#EDB9A0"}
_UNJUDGED: Final = "#F2F2F2"


def draw_survival(results: Sequence[Result]) -> "Figure":
    """Return a picture with a field for each strategy and RAM limit, coloured by the verdict."""
    drawn = matrices(results)[: look.MAX_PANELS]
    heights = [0.55 * len(matrix.rows) + 0.7 for matrix in drawn]
    figure, grid = look.new_figure(sum(heights), len(drawn), 1, height_ratios=heights)
    for axes, matrix in zip(grid[:, 0], drawn, strict=True):
        _draw_matrix(axes, matrix)
    first = drawn[0]
    words = kind_of(first).words
    time, rule = notes(results)
    if first.model_bytes:
        rule += " 1x reread: the bytes read again equal the size of the model."
    title = f"Which {words['several']} survive which RAM limit? {_model(first)}"
    handles = _legend(words["thrashes"])
    look.dress(figure, title, handles, [time, rule, caption(first, results)])
    return figure


def draw_times(results: Sequence[Result]) -> "Figure":
    """Return a picture of each strategy's time over RAM limits; an x marks the first failure."""
    drawn = matrices(results)[: look.MAX_PANELS]
    figure, grid = look.new_figure(3.6 * len(drawn), len(drawn), 1)
    handles: dict[str, Any] = {}
    for axes, matrix in zip(grid[:, 0], drawn, strict=True):
        handles |= _draw_times(axes, matrix)
    lines = [*notes(results), caption(drawn[0], results)]
    title = f"Time under lower RAM limits: {_model(drawn[0])}"
    look.dress(figure, title, [*handles.values(), *_signs()], lines)
    return figure


def _draw_matrix(axes: "Axes", matrix: Matrix) -> None:
    from matplotlib.patches import Rectangle

    columns, rows = len(matrix.limits), len(matrix.rows)
    for row in range(rows):
        for column in range(columns):
            field = matrix.fields.get((row, column))
            fill = FILLS[field.judgement.verdict] if field and field.judgement else _UNJUDGED
            axes.add_patch(
                Rectangle((column, row), 1, 1, facecolor=fill, edgecolor="white", linewidth=2)
            )
            above, below = field_words(field)
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": look.INK}
            axes.text(column + 0.5, row + (0.32 if below else 0.5), above, fontsize=9, **style)
            axes.text(column + 0.5, row + 0.72, below, fontsize=6.5, linespacing=1.0, **style)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([n + 0.5 for n in range(columns)], [heading(limit) for limit in matrix.limits])
    axes.set_yticks(
        [n + 0.5 for n in range(rows)], [look.verbatim(matrix.label(n)) for n in range(rows)]
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9, colors=look.INK)
    axes.spines[:].set_visible(False)
    for column, words in _limits_below(matrix):
        axes.axvline(column, color="black", linewidth=1.6, linestyle="--")
        axes.text(column, rows + 0.08, words, fontsize=8, va="top", color=look.INK)


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
    time, pages = format_seconds(field.spent_ns), refaults(result)
    again = (
        ""
        if pages is None or not result.model_bytes
        else f"{pages * result.page_bytes / result.model_bytes:.1f}x"
    )
    if verdict is Verdict.THRASHES:
        return time, f"thrashes\n{again} reread" if again else "thrashes"
    return time, f"{again} reread" if again and again != "0.0x" else ""


def _draw_times(axes: "Axes", matrix: Matrix) -> dict[str, Any]:
    """Draw one line per strategy, and return the entries of the legend by the name of the strategy."""
    columns, handles = len(matrix.limits), {}
    for row, cell in enumerate(matrix.rows):
        shade, name = look.colour(cell.strategy), matrix.label(row)
        fields = [matrix.fields.get((row, column)) for column in range(columns)]
        points = [
            (column, field.spent_ns / 1e9, field)
            for column, field in enumerate(fields)
            if field and field.spent_ns
        ]
        (handles[name],) = axes.plot(
            [x for x, _, _ in points], [y for _, y, _ in points],
            color=shade, linewidth=1.8, label=look.verbatim(name),
        )  # fmt: skip
        for x, y, field in points:
            is_slow = bool(field.judgement and field.judgement.verdict is Verdict.THRASHES)
            axes.plot(
                x, y, color=shade, marker="^" if is_slow else "o", markersize=7 if is_slow else 5
            )
        if points and points[-1][0] + 1 < columns:
            x, y, _ = points[-1]
            axes.plot([x, x + 1], [y, y], color=shade, linewidth=1, linestyle=":")
            axes.plot(x + 1, y, color=shade, marker="x", markersize=7, markeredgewidth=2)
    axes.set_xticks(range(columns), [heading(limit) for limit in matrix.limits])
    axes.set_xlim(-0.3, columns - 0.7)
    look.frame_curves(axes, "RAM limit", "time, s", log_seconds=True)
    for column, words in _limits_below(matrix):
        axes.axvline(column - 0.5, color="black", linewidth=1.2, linestyle="--", zorder=0)
        across = axes.get_xaxis_transform()
        axes.text(column - 0.5, 1.01, words, transform=across, fontsize=8, color=look.INK)
    return handles


def _model(matrix: Matrix) -> str:
    return captions.dimension("model", matrix.scene.model.title, matrix.model_bytes)


def _legend(thrashes: str) -> list[Any]:
    from matplotlib.patches import Patch

    words = {
        Verdict.SURVIVES: "survives",
        Verdict.THRASHES: f"thrashes: {thrashes}",
        Verdict.KILLED: "killed for lack of memory",
    }
    return [Patch(facecolor=FILLS[verdict], label=text) for verdict, text in words.items()]


def _signs() -> list[Any]:
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": "", "color": look.INK}
    return [
        Line2D([], [], marker="o", markersize=5, label="survives", **style),
        Line2D([], [], marker="^", markersize=7, label="thrashes", **style),
        Line2D([], [], marker="x", markersize=7, markeredgewidth=2, label="killed", **style),
    ]
