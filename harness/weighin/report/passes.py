"""Tabulate the forward passes after a load: the time and the major faults of each pass."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.record import Phase, Result
from weighin.records.repeats import grouped, middle
from weighin.report import captions
from weighin.report.blocks import Drawable, Found, ListEntry
from weighin.report.dataframe import known, series, varying
from weighin.report.markdown import table_lines
from weighin.text import markdown as escaped
from weighin.units import format_seconds

NOTE: Final = (
    "Each pass: its time, its major faults (waits for the disk), and the bytes read again as a multiple"
    " of the model (refaults: pages that had been in memory before)."
)


def has_data(results: Sequence[Result]) -> bool:
    """Return whether at least one model was called more than once."""
    return any(len(_passes(result)) > 1 for result in results)


def terminal_passes(results: Sequence[Result]) -> RenderableType:
    """Return the passes of each series for a terminal."""
    names, rows = table(results)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, heading in enumerate(headings(names, rows)):
        drawn.add_column(
            heading, justify="left" if index < len(names) else "right", overflow="fold"
        )
    for row in rows:
        drawn.add_row(*row)
    return Group(drawn, Text(NOTE, style="dim"), Text(caption(results), style="dim"))


def markdown_passes(results: Sequence[Result]) -> str:
    """Return the passes of each series as a markdown table."""
    names, rows = table(results)
    lines = table_lines(headings(names, rows), rows, names=len(names))
    return "\n".join([*lines, "", escaped(NOTE), "", escaped(caption(results))])


def html_passes(results: Sequence[Result]) -> list[Drawable]:
    """Return the passes of each series as a block of report.html."""
    names, rows = table(results)
    entries = [[ListEntry(text) for text in row] for row in rows]
    heads = headings(names, rows)
    return [Found("Forward passes", caption(results), heads, entries, len(names), [NOTE])]


def caption(results: Sequence[Result]) -> str:
    """Return the properties that all cells share."""
    return captions.shared(series(results), results)


def headings(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    most = max(len(row) for row in rows) - len(names)
    return [*names, *(f"pass {number + 1}" for number in range(most))]


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that identify a series, and a row for each series.

    A row shows the repeat whose passes took the median time.
    """
    frame = series(results)
    extra = varying(frame)
    groups = grouped(filter(_passes, results), lambda one: one.cell.series)
    rows = []
    for _, row in frame.iterrows():
        if (repeats := groups.get(row["group"])) is None:
            continue
        typical_ns = middle(map(_spent_ns, repeats))
        chosen = next(repeat for repeat in repeats if _spent_ns(repeat) == typical_ns)
        words = [
            captions.size(known(row[n])) if n == "ram_limit_bytes" else str(row[n]) for n in extra
        ]
        rows.append([row["strategy"], *words, *(_pass_text(p, chosen) for p in _passes(chosen))])
    width = max(map(len, rows))
    heads = ["strategy", *("RAM limit" if name == "ram_limit_bytes" else name for name in extra)]
    return heads, [row + ["-"] * (width - len(row)) for row in rows]


def _pass_text(phase: Phase, result: Result) -> str:
    words = [format_seconds(phase.end_ns - phase.start_ns), f"{phase.major_faults} faults"]
    if phase.workingset_refault_file is not None and result.model_bytes:
        words.append(
            f"{phase.workingset_refault_file * result.page_bytes / result.model_bytes:.2f}x reread"
        )
    return ", ".join(words)


def _passes(result: Result) -> list[Phase]:
    return [phase for phase in result.phases if phase.name == "forward"]


def _spent_ns(result: Result) -> int:
    return sum(phase.end_ns - phase.start_ns for phase in _passes(result))
