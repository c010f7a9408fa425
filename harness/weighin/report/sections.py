"""Define the sections of a report, which are the same in the terminal, report.md and report.html."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from weighin.records.metrics import grouped
from weighin.report import (
    after_load,
    captions,
    commands,
    floors,
    passes,
    ranks,
    slow_disks,
    survival,
    survival_plots,
    tables,
)
from weighin.report import terminal as terminals
from weighin.report.findings import Found, markdown, terminal
from weighin.report.html import facts
from weighin.report.html.table import build
from weighin.report.markdown import plain
from weighin.report.rows import Row, series
from weighin.result import Result
from weighin.text import markdown as escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

FIGURES: Final = "How to read the figures"
Block = tuple[str, Any]
"""The file name of an HTML template for a part of report.html, and the data for the template."""
Pictures = Sequence["tuple[str, Callable[[], Figure]]"]
"""The name of each picture, with the function that draws the picture."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report; its functions return it for the terminal, report.md and report.html.

    ``is_found`` is True for a section from ``findings``, such as RAM floors; a terminal shows it last.
    """

    heading: str
    terminal: Callable[[], "RenderableType"]
    markdown: Callable[[], str]
    html: Callable[[], list[Block]]
    is_found: bool = False
    pictures: Pictures = ()


def terminal_table(results: Sequence[Result], warnings: Sequence[str] = ()) -> "RenderableType":
    """Return the report of a run for a terminal, where the most important sections are printed last."""
    parts: list[RenderableType] = [] if results else [Text("No cells were measured.")]
    for section in sorted(of(results, warnings), key=lambda section: section.is_found):
        parts += [Text(section.heading, style="bold"), section.terminal()]
    return Group(*parts)


def of(results: Sequence[Result], warnings: Sequence[str] = ()) -> list[Section]:
    """Return the sections of a report in order; ``warnings`` are warnings about records.jsonl.

    Sections from ``findings``, such as RAM floors, come before the long table of all results.
    """
    rows = series(results)
    if not rows:
        return [*_listed("Warnings", [("", text) for text in warnings], style="yellow")]
    all_warnings = captions.warnings(results, warnings)
    return [
        *findings(results),
        _cells(rows, results),
        *_listed("Not ok", tables.what_went_wrong(rows)),
        *_of_commands(results),
        *_refused(results),
        *_listed("Warnings", [("", text) for text in all_warnings], style="yellow"),
        _figures(rows, results),
    ]


def findings(results: Sequence[Result]) -> Iterator[Section]:
    """Yield a section each for ranks, uses, passes, slow disks, and floors or survival, if measured."""
    tables_drawn: list[tuple[list[Found], Pictures]] = [
        (ranks.found(results), [("ranks", partial(ranks.draw_ranks, results))]),
        (after_load.found(results), ()),
        (passes.found(results), ()),
        (slow_disks.found(results), slow_disks.pictures(results)),
    ]
    for found, drawn in tables_drawn:
        if found:
            yield _tables(found[0].label, found, is_found=True, pictures=drawn)
    if floors.has_data(results):  # the limits of a search for floors form no matrix
        yield _tables("RAM floors", floors.found(results), is_found=True)
    elif found := survival.found(results):
        pictures = (
            ("survival", partial(survival_plots.draw_survival, results)),
            ("time-over-limit", partial(survival_plots.draw_times, results)),
        )
        yield _tables("Survival", found, is_found=True, pictures=pictures)


def _tables(
    heading: str, found: Sequence[Found], *, is_found: bool = False, pictures: Pictures = ()
) -> Section:
    return Section(
        heading,
        partial(terminal, found),
        partial(markdown, found),
        lambda: [("found.html", one) for one in found],
        is_found,
        pictures,
    )


def _cells(rows: Sequence[Row], results: Sequence[Result]) -> Section:
    return Section(
        "All results",
        lambda: terminals.cells(rows, results),
        lambda: "\n".join(tables.markdown_cells(rows, "### {}")).rstrip("\n"),
        lambda: [("cells.html", build(rows))],
    )


def _listed(heading: str, items: Sequence[tuple[str, str]], style: str = "") -> Iterator[Section]:
    """Yield a section that lists ``items``, pairs of a name and a text, unless there are none."""
    if items:
        lines = [": ".join(filter(None, item)) for item in items]
        yield _of_lines(heading, lines, style, [("items.html", items)])


def _of_lines(heading: str, lines: Sequence[str], style: str, html: list[Block]) -> Section:
    return Section(
        heading,
        lambda: Group(*(Text(line, style=style) for line in lines)),
        lambda: "\n".join(f"- {escaped(line)}" for line in lines),
        lambda: html,
    )


def _refused(results: Sequence[Result]) -> Iterator[Section]:
    """Yield a section for each strategy that ran out of GPU memory: the CUDA allocator's summary."""
    refused = [result for result in results if result.allocator_summary]
    for strategy, ours in grouped(refused, lambda one: plain(one.cell.strategy)).items():
        heading = f"{strategy} ran out of GPU memory: the allocator's summary"
        yield _verbatim(heading, "\n\n".join(_preformatted(one.allocator_summary) for one in ours))


def _of_commands(results: Sequence[Result]) -> Iterator[Section]:
    """Yield sections on commands: kills, processes, marked output lines and Python stacks."""
    for found in commands.listings(results):
        yield _tables(found.label, [found])
    if text := commands.stacks(results):
        yield _verbatim(commands.STACKS, text)


def _verbatim(heading: str, text: str) -> Section:
    """Return a section that keeps the line breaks and spaces of ``text``."""
    return Section(
        heading,
        partial(Text, text),
        lambda: f"```\n{_preformatted(text)}\n```",
        lambda: [("preformatted.html", text)],
    )


def _figures(rows: Sequence[Row], results: Sequence[Result]) -> Section:
    unused = captions.note_unused(results)
    html: list[Block] = [("items.html", [("", line) for line in unused])] if unused else []
    html.append(("explained.html", facts.figures(rows)))
    return _of_lines(FIGURES, [*unused, *captions.note_figures(rows)], "dim", html)


def _preformatted(text: str) -> str:
    """Return a text for a code block: without control characters, and with ' for each backtick."""
    lines = ("".join(c for c in line if c.isprintable()) for line in text.strip().splitlines())
    return "\n".join(line.replace("`", "'") for line in lines)
