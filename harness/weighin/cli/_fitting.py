"""Fit tables into the terminal's width. If a table is too wide, print each row as several lines.

Without this module, the library rich would break words in the columns that it narrows.
"""

import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from weighin.text import printable

_ANY_WIDTH = 10_000  # columns


class FittingConsole(Console):
    """A console that breaks no word in tables: it prints each table that is too wide as lines.

    It prints no control character of a text: a record may be a stranger's.
    """

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text, "\n\t"), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        options = options or self.options
        if isinstance(renderable, Table):
            renderable = _fitted(self, options, renderable)
        return super().render(renderable, options)


def _fitted(console: Console, options: ConsoleOptions, table: Table) -> RenderableType:
    if _widest(console, table) <= options.max_width:
        return table
    columns = [_measure(console, column) for column in table.columns]
    room = sum(column.maximum - column.minimum for column in columns)
    fitted = copy(table)
    if table.box and _widest(console, table) - options.max_width > room:
        fitted.padding = (0, 0)  # the box keeps one space between two columns
    missing = _widest(console, fitted) - options.max_width
    if missing > room:
        return _Blocks(table)
    fitted.columns = [
        replace(column, width=width)
        for column, width in zip(table.columns, _narrowed(columns, missing), strict=True)
    ]
    return fitted


def _widest(console: Console, table: Table) -> int:
    """Return the table's width in columns if no line is wrapped."""
    return Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum


def _measure(console: Console, column: Column) -> Measurement:
    """Return a column's least width (no word breaks) and greatest width (no line wraps)."""
    anywhere = console.options.update(width=_ANY_WIDTH)
    parts = [Measurement.get(console, anywhere, part) for part in (column.header, *column.cells)]
    widest = max(part.maximum for part in parts)
    least = widest if column.no_wrap else max(part.minimum for part in parts)
    least = max(least, column.width or column.min_width or 0)
    return Measurement(least, max(least, widest))


def _narrowed(columns: list[Measurement], missing: int) -> list[int]:
    """Return the columns' widths after ``missing`` steps. Each step takes one character from the
    widest column that can still shrink.
    """
    widths = [column.maximum for column in columns]
    for _ in range(missing):
        able = [at for at, column in enumerate(columns) if widths[at] > column.minimum]
        widths[max(able, key=lambda at: widths[at])] -= 1
    return widths


class _Blocks:
    """A table as lines: for each row, its first cell, then "heading: value" for each other cell."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        table = self._table
        if table.title:
            yield Group(_text(console, table.title), "")
        headings = [_heading(console, column) for column in table.columns]
        for row in zip(*(column.cells for column in table.columns), strict=True):
            first, *cells = (_text(console, cell) for cell in row)
            if first.plain.strip():
                first.stylize("bold")
                yield first
            for heading, cell in zip(headings[1:], cells, strict=True):
                if cell.plain.strip():
                    named = Text(f"{heading}: " if heading else "").append_text(cell)
                    yield from _hanging(console, named, options.max_width)
        if table.caption:
            yield _text(console, table.caption)


def _hanging(console: Console, text: Text, width: int) -> Iterator[Text]:
    lines = text.wrap(console, max(width - 4, 1))
    for number, line in enumerate(lines):
        line.rstrip()
        yield Text("    " if number else "  ").append_text(line)


def _heading(console: Console, column: Column) -> str:
    """Return a heading in one line; join a word that a hyphen splits over two lines ("anony-",
    "mous").
    """
    text = column.header if isinstance(column.header, Text) else _text(console, column.header)
    return " ".join(re.sub(r"-\s*\n", "", text.plain).split())


def _text(console: Console, cell: RenderableType) -> Text:
    text = cell.copy() if isinstance(cell, Text) else console.render_str(str(cell))
    return Text(" ").join(text.split("\n"))
