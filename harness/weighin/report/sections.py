"""The sections of a run's report: one list, which the terminal, report.md and report.html walk."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import pandas as pd
from rich.console import Group
from rich.text import Text

from weighin.record import Result
from weighin.records.survival import matrices
from weighin.report import captions, floors, notebook, passes, survival, survival_plots, tables
from weighin.report import terminal as terminals
from weighin.report.blocks import Cells, Drawable, Explained, Items, Preformatted
from weighin.report.dataframe import series
from weighin.report.html import facts
from weighin.report.html.table import build
from weighin.report.markdown import plain
from weighin.text import markdown as escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

FIGURES: Final = "What the figures are"


@dataclass(frozen=True, slots=True)
class Section:
    """One section, and what each of the three says in it below its heading.

    ``is_found`` tells what the run has found from what every run has; ``pictures`` are names, and
    what draws each.
    """

    heading: str
    terminal: Callable[[], "RenderableType"]
    markdown: Callable[[], str]
    html: Callable[[], list[Drawable]]
    is_found: bool = False
    pictures: Sequence[tuple[str, Callable[[], "Figure"]]] = ()


def of(results: Sequence[Result], warnings: Sequence[str] = ()) -> list[Section]:
    """Return the sections of a run in their order; ``warnings`` are those of its records' file.

    What was found is what a reader came for: it stands before the long table.
    """
    frame = series(results)
    if frame.empty:
        return [*_listed("Warnings", [("", one) for one in warnings], style="yellow")]
    said = captions.warnings(results, warnings)
    return [
        *findings(results),
        _cells(frame, results),
        *_listed("Not ok", tables.what_went_wrong(frame)),
        *_refused(results),
        *_listed("Warnings", [("", one) for one in said], style="yellow"),
        _figures(frame, results),
    ]


def findings(results: Sequence[Result]) -> Iterator[Section]:
    """Yield what a run has found beside its table of all series, in the order in which it is told."""
    drawn = (
        ("survival", partial(survival_plots.draw_survival, results)),
        ("time-over-limit", partial(survival_plots.draw_times, results)),
    )
    if passes.has_data(results):
        ways = passes.terminal_passes, passes.markdown_passes, passes.html_passes
        yield _finding("Forward passes", results, *ways)
    is_search = floors.has_data(results)  # which tries other limits in each row
    if matrices(results) and not is_search:
        ways = survival.terminal_survival, survival.markdown_reasons, survival.html_survival
        yield _finding("Survival", results, *ways, drawn)
    if notebook.has_data(results):
        ways = notebook.terminal_notebook, notebook.markdown_notebook, notebook.html_notebook
        yield _finding("Beside the notebook's published figures", results, *ways)
    if is_search:
        ways = floors.terminal_floors, floors.markdown_reasons, floors.html_floors
        yield _finding("RAM floors", results, *ways)


def _finding(
    heading: str,
    results: Sequence[Result],
    terminal: Callable[[Sequence[Result]], "RenderableType"],
    markdown: Callable[[Sequence[Result]], str],
    html: Callable[[Sequence[Result]], list[Drawable]],
    pictures: Sequence[tuple[str, Callable[[], "Figure"]]] = (),
) -> Section:
    shown = partial(terminal, results), partial(markdown, results), partial(html, results)
    return Section(heading, *shown, is_found=True, pictures=pictures)


def _cells(frame: pd.DataFrame, results: Sequence[Result]) -> Section:
    return Section(
        "All cells",
        lambda: terminals.cells(frame, results),
        lambda: "\n".join(tables.markdown_cells(frame, "### {}")).rstrip("\n"),
        lambda: [Cells(build(frame))],
    )


def _listed(heading: str, items: Sequence[tuple[str, str]], style: str = "") -> Iterator[Section]:
    """Yield a list of who and what, where there is something to list."""
    lines = [": ".join(filter(None, item)) for item in items]
    if items:
        yield Section(
            heading,
            lambda: Group(*(Text(line, style=style) for line in lines)),
            lambda: "\n".join(f"- {escaped(line)}" for line in lines),
            lambda: [Items(items)],
        )


def _refused(results: Sequence[Result]) -> Iterator[Section]:
    """Yield what torch's allocator said of each strategy that it refused."""
    said: dict[str, list[str]] = {}
    for result in results:
        if result.allocator_summary:
            texts = said.setdefault(plain(result.cell.strategy), [])
            texts.append(_preformatted(result.allocator_summary))
    for who, text in ((who, "\n\n".join(texts)) for who, texts in said.items()):
        yield Section(
            f"Where {who} ran out of GPU memory",
            partial(Text, text),
            partial("```\n{}\n```".format, text),
            partial(_blocks, Preformatted(text)),
        )


def _figures(frame: pd.DataFrame, results: Sequence[Result]) -> Section:
    unused = captions.note_unused(results)
    notes = [*unused, *tables.note_lines(frame)]
    return Section(
        FIGURES,
        lambda: Group(*(Text(line, style="dim") for line in notes)),
        lambda: "\n".join(f"- {escaped(line)}" for line in notes),
        lambda: [*_items(unused), Explained(facts.figures(frame))],
    )


def _items(lines: Sequence[str]) -> list[Drawable]:
    return [Items([("", line) for line in lines])] if lines else []


def _blocks(*blocks: Drawable) -> list[Drawable]:
    return [*blocks]


def _preformatted(text: str) -> str:
    """Return text of several lines as a code block can hold it."""
    lines = ("".join(c for c in line if c.isprintable()) for line in text.strip().splitlines())
    return "\n".join(line.replace("`", "'") for line in lines)
