"""Tabulate and draw the memory of loads by several ranks (processes that load a model at once)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from weighin.records.metrics import middle, sum_of_peaks, unreclaimable
from weighin.records.series import RankSeries, label_among, over_ranks
from weighin.report import captions
from weighin.report import style as look
from weighin.report.findings import Found, of_texts
from weighin.report.markdown import scaled
from weighin.report.rows import series
from weighin.result import Result
from weighin.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADINGS: Final = (
    "strategy",
    "ranks",
    "cgroup peak, GiB",
    "above the imports, x model",
    "unreclaimable (sampled), x model",
    "PSS at ready, GiB",
    "sum of peak RSS, GiB",
    "growth",
)
NOTE: Final = (
    "The cgroup's peak counts each page once, with the page cache of the checkpoint; above the"
    " imports: minus the cgroup's memory when all ranks had imported torch. Unreclaimable:"
    " anonymous and shared memory above the imports. The sum of the ranks' peak RSS counts shared"
    " pages once for each rank; it is not the memory that the ranks need, although other tools"
    " print it."
)
RULE: Final = (
    "Growth: flat if each further rank adds less than 0.25 times the model, linear from 0.75 times."
)


def found(results: Sequence[Result]) -> list[Found]:
    """Return a table of the memory of all ranks; an empty list if no load by several ranks ended ok."""
    rows = of_texts(_rows(results))
    caption, notes = captions.shared(series(results), results), [NOTE, RULE]
    return [Found("Memory of all ranks", HEADINGS, rows, 2, caption, notes)] if rows else []


def draw_ranks(results: Sequence[Result]) -> "Figure":
    """Return a drawing of the memory of all ranks together, plotted over the number of ranks."""
    measured = over_ranks(results)
    cells = [each.cell for each in measured]
    figure, grid = look.new_figure(3.4, 1, 1)
    axes = grid[0][0]
    handles: list[Any] = []
    for each in measured:
        points = [(ranks, size / (each.model_bytes or GIB)) for ranks, size in each.charges.items()]
        (handle,) = axes.plot(
            [x for x, _ in points], [y for _, y in points], "o-",
            color=look.colour(each.cell.strategy), linewidth=1.8, markersize=5,
            label=look.verbatim(label_among(each.cell, cells)),
        )  # fmt: skip
        handles.append(handle)
    numbers = sorted({ranks for each in measured for ranks in each.charges})
    axes.plot(numbers, numbers, color=look.GREY, linestyle=":", linewidth=1)
    if numbers:
        axes.annotate(
            "one copy in each rank", (numbers[-1], numbers[-1]), xytext=(-4, 4), ha="right",
            textcoords="offset points", fontsize=7, color=look.INK,
        )  # fmt: skip
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    look.frame_curves(axes, "ranks", "all ranks above the imports, x model")
    title = look.headline(series(results), "Memory over the number of ranks:")
    look.dress(
        figure, title, handles, [f"{NOTE} {RULE}", captions.shared(series(results), results)]
    )
    return figure


def _rows(results: Sequence[Result]) -> list[list[str]]:
    measured, rows = over_ranks(results), []
    cells = [each.cell for each in measured]
    for each in measured:
        for ranks, repeats in each.by_ranks.items():
            charge = each.charges.get(ranks)
            rows.append(
                [
                    label_among(each.cell, cells),
                    str(ranks),
                    scaled(middle(one.peaks.cgroup_bytes for one in repeats), GIB, 3),
                    scaled(charge, each.model_bytes, 2),
                    scaled(middle(map(unreclaimable, repeats)), each.model_bytes, 2),
                    scaled(middle(one.peaks.pss_bytes for one in repeats), GIB, 3),
                    scaled(
                        middle(sum_of_peaks(one) or one.peaks.rss_bytes for one in repeats), GIB, 3
                    ),
                    _growth(each) if ranks == max(each.by_ranks) else "",
                ]
            )
    return rows


def _growth(each: RankSeries) -> str:
    if each.growth is None:
        return "-"
    return f"{each.growth} ({each.copies_per_rank:.2f}x a rank)"
