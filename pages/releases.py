"""Write and draw what a load takes with each release of a package, from the records of suites with ``with:``."""

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement
from packaging.version import Version

from pages import run_tables
from weighin.install import requirements_in
from weighin.records.metrics import grouped, middle, outcome_of
from weighin.records.series import Measured
from weighin.result import Outcome, Result
from weighin.show import style
from weighin.show.table import Table
from weighin.show.words import scaled
from weighin.text import markdown as escaped
from weighin.text import one_line

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.figure import Figure

_REASON_LENGTH: Final = 62  # characters
_USUAL: Final = re.compile(f"{run_tables.USUAL.pattern}|isolation cgroup|format .*")
_PLACE: Final = re.compile(r" \(\w+\.py:\d+\)$")
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", style.INK)
_MARKERS: Final = "osD^vP"


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
    several = len({one.cell.model.title for one in results}) > 1
    if len({one.cell.strategy for one in results}) == 1:
        return grouped(results, lambda one: one.cell.model.title)
    return grouped(results, lambda one: f"{one.cell.model.title} · " * several + one.cell.strategy)


def markdown_releases(results: Sequence[Result], picture: str) -> str:
    """Return a picture and a table: a row per release, a column per model or strategy, and why some did not load."""
    package, reasons = package_of(results), dict[str, int]()
    columns = {
        title: _column(in_order(ours, package), reasons)
        for title, ours in _lines_of(results).items()
    }
    rows = [
        [release, *(column.get(release, "-") for column in columns.values())]
        for release in in_order(results, package)
    ]
    loads = len({one.cell.repeat for one in results})
    run = Measured([one for one in results if one.outcome is Outcome.OK] or results)
    parts = [
        f"![Peaks by release of {package}]({picture})",
        Table.of([package, *columns], rows).markdown(),
        "\n".join(f"{number}. {escaped(why)}" for why, number in reasons.items()),
        f"medians of {loads} · " * (loads > 1) + run_tables.caption(run, _USUAL),
    ]
    return "\n\n".join(filter(None, parts))


def _column(found: Mapping[str, Sequence[Result]], reasons: dict[str, int]) -> dict[str, str]:
    """Return the peak with each release, with the time if times are far apart, or else the number of the reason."""
    column, times = dict[str, str](), dict[str, int]()
    for release, repeats in found.items():
        if good := [one for one in repeats if one.outcome is Outcome.OK]:
            peak = middle(map(run_tables.anonymous_bytes, good))
            column[release] = scaled(peak, good[0].model_bytes, 2)
            if time := middle(one.ready_ns for one in good):
                times[release] = time
        else:
            first = repeats[0]
            why = first.message.partition("\n")[0].replace(f" {first.cell.releases}: ", ": ")
            why = one_line(_PLACE.sub("", why) or outcome_of(one.outcome for one in repeats))
            why = shorten(why, _REASON_LENGTH, placeholder=" ...")
            column[release] = f"no ({reasons.setdefault(why, len(reasons) + 1)})"
    if times and max(times.values()) >= 2 * min(times.values()):
        for release, time in times.items():
            column[release] += f" · {scaled(time, 1e9, 2)} s"
    return column


def draw_releases(results: Sequence[Result]) -> "Figure":
    """Draw the anonymous peak over the releases: a line per model or strategy, with gaps where none was measured."""
    package = package_of(results)
    order = list(in_order(results, package))
    figure, (axes,) = style.new_figure([3.2])
    handles = []
    for number, (title, ours) in enumerate(_lines_of(results).items()):
        good = in_order([one for one in ours if one.outcome is Outcome.OK], package)
        peaks = dict.fromkeys(order, float("nan"))
        for release, found in good.items():
            peak = middle(map(run_tables.anonymous_bytes, found)) or 0
            peaks[release] = peak / (found[0].model_bytes or 1)
        look: dict[str, Any] = {"color": _COLOURS[number % 6], "marker": _MARKERS[number % 6]}
        look["linewidth"] = 1.4
        axes.plot(range(len(order)), list(peaks.values()), markersize=4.5, **look)
        handles += style.legend((True, style.verbatim(title), look))
    axes.set_xticks(range(len(order)), order)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_ylabel("anonymous peak, x model", fontsize=9)
    style.tidy(axes)
    note = "Sampled maximum of anonymous memory until ready, above the memory after all imports, divided by the model's size."
    style.dress(figure, f"Loading with each release of {package}", handles, [note])
    return figure
