"""Write and draw what a load takes with each release of a package, from the records of suites with ``with:``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement
from packaging.version import Version

from pages import run_tables
from weighin.install import requirements_in
from weighin.records.metrics import grouped, middle, outcome_of
from weighin.records.series import Measured
from weighin.result import Outcome, Result
from weighin.show import style
from weighin.show.words import scaled
from weighin.text import markdown as escaped
from weighin.text import one_line
from weighin.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.figure import Figure

_COLUMNS: Final = ("anonymous (sampled), x model", "peak RSS, x model", "ready")
_REASON_LENGTH: Final = 110  # characters
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", style.INK)
_MARKERS: Final = "osD^vP"
_LINE_WIDTH: Final = 1.4


def package_of(results: Sequence[Result]) -> str:
    """Return the name of the package that the choice of each cell names."""
    return min(set[str].intersection(*({*_asked(one)} for one in results)))


def _asked(result: Result) -> dict[str, str]:
    """Return the releases that a cell's choice names exactly, by their packages."""
    asked = map(Requirement, requirements_in(result.cell.releases))
    return {one.name: next(iter(one.specifier)).version for one in asked}


def in_order(results: Sequence[Result], package: str) -> dict[str, list[Result]]:
    """Return the repeats of each release, in the order of the releases."""
    found = grouped(results, lambda one: _asked(one)[package])
    return dict(sorted(found.items(), key=lambda one: Version(one[0])))


def _lines_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results by what a line of the picture is called: the model, or the strategy of several."""
    strategies = {one.cell.strategy for one in results}
    models = {one.cell.model.title for one in results}

    def name(one: Result) -> str:
        parts = [one.cell.model.title] * (len(models) > 1 or len(strategies) == 1)
        return " · ".join([*parts, *[one.cell.strategy] * (len(strategies) > 1)])

    return grouped(results, name)


def markdown_releases(results: Sequence[Result], picture: str) -> str:
    """Return a picture, and a table per model and strategy: a row per release, with peaks above the imports."""
    package = package_of(results)
    parts = [f"![Anonymous peak with each release of {package}]({picture})"]
    for title, ours in _lines_of(results).items():
        size = next((one.model_bytes for one in ours if one.model_bytes), 0)
        heading = (
            f"**{escaped(title)}** ({format_bytes(size)})" if size else f"**{escaped(title)}**"
        )
        rows = [
            [release, *_figures(repeats)] for release, repeats in in_order(ours, package).items()
        ]
        lines = [f"| {' | '.join(row)} |" for row in [[package, *_COLUMNS], *rows]]
        parts += [heading, "\n".join([lines[0], "| --- | ---: | ---: | ---: |", *lines[1:]])]
    run = Measured([one for one in results if one.outcome is Outcome.OK] or results)
    return "\n\n".join([*parts, run_tables.caption(run)])


def _figures(repeats: Sequence[Result]) -> list[str]:
    good = [one for one in repeats if one.outcome is Outcome.OK]
    if not good:
        reason = repeats[0].message.partition("\n")[0]
        about = f" {repeats[0].cell.releases}: "
        text = reason.replace(about, ": ") or outcome_of(one.outcome for one in repeats)
        return [escaped(one_line(text, _REASON_LENGTH)), "-", "-"]
    size, ready_ns = good[0].model_bytes, middle(one.ready_ns for one in good)
    return [
        scaled(middle(map(run_tables.anonymous_bytes, good)), size, 2),
        scaled(middle(map(run_tables.resident_bytes, good)), size, 2),
        "-" if ready_ns is None else format_seconds(ready_ns),
    ]


def draw_releases(results: Sequence[Result]) -> "Figure":
    """Draw the anonymous peak over the releases: a line per model or strategy, with gaps where none was measured."""
    package = package_of(results)
    order = list(in_order(results, package))
    figure, (axes,) = style.new_figure([3.2])
    handles = []
    for number, (title, ours) in enumerate(_lines_of(results).items()):
        good = in_order([one for one in ours if one.outcome is Outcome.OK], package)
        peaks = [
            (middle(map(run_tables.anonymous_bytes, found)) or 0) / (found[0].model_bytes or 1)
            if (found := good.get(release))
            else float("nan")
            for release in order
        ]
        look: dict[str, Any] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "marker": _MARKERS[number % 6],
        }
        axes.plot(range(len(order)), peaks, linewidth=_LINE_WIDTH, markersize=4.5, **look)
        handles += style.legend((True, style.verbatim(title), {"linewidth": _LINE_WIDTH, **look}))
    axes.set_xticks(range(len(order)), order)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_ylabel("anonymous peak, x model", fontsize=9)
    style.tidy(axes)
    note = "Sampled maximum of anonymous memory until ready, above the memory after all imports, divided by the model's size."
    style.dress(figure, f"Loading with each release of {package}", handles, [note])
    return figure
