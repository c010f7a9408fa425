"""Print the tables of a run so that they fit the width of a terminal and no number is cut off."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weighin.report import captions
from weighin.report.rows import Row
from weighin.report.tables import HEADINGS, LEFT_OUT_FIRST, TextTable, text_tables
from weighin.result import Outcome, Result

T = TypeVar("T")

_STYLES: Final = {outcome.value: "red" for outcome in Outcome} | {"ok": "green", "skipped": "dim"}
# The values of these columns are printed below the name of the strategy, to save width.
_BELOW_NAME: Final = frozenset(("format", "options"))
_LEFT_OUT: Final = "Left out at {} columns: {}. All columns are in report.md and --json."
_ANY_WIDTH: Final = 10_000  # columns


class _Layout(NamedTuple):
    """One way to save width in a table."""

    apart: int = 0  # spaces on the left and right of a column
    range_rows: bool = True  # "from" and "to" are rows of their own


# A table uses the first of these layouts that fits the terminal.
_LAYOUTS: Final = (_Layout(1, False), _Layout(0, False), _Layout())


def cells(rows: Sequence[Row], results: Sequence[Result]) -> RenderableType:
    """Return a table for each operation, model and device, in which each row summarises repeats."""
    parts: list[RenderableType] = []
    for table in map(_stacked, text_tables(rows)):
        if table.heading:
            parts.append(Text(table.heading, style="underline"))
        parts.append(_Fitted(table))
    return Group(*parts, Text(captions.shared(rows, results), style="dim"))


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A table that fits itself to the width of the console when it is printed.

    It tries each layout, then each layout with more and more columns left out. If even the narrowest
    table is too wide, it prints the table with all columns, because a cut number would be wrong.
    """

    section: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        anywhere = options.update(width=_ANY_WIDTH)
        for left_out, section in _narrower(self.section):
            for layout in _LAYOUTS:
                table = _table(section, layout)
                if Measurement.get(console, anywhere, table).minimum <= options.max_width:
                    yield table
                    if left_out:
                        yield Text(_LEFT_OUT.format(options.max_width, ", ".join(left_out)))
                    return
        yield _table(self.section, _LAYOUTS[0])


def _narrower(section: TextTable) -> Iterator[tuple[list[str], TextTable]]:
    """Yield the table, then ever narrower ones, each with the headings of its left-out columns."""
    yield [], section
    headings = [heading for heading, _ in section.columns]
    left_out = [heading for heading in LEFT_OUT_FIRST if heading in headings]
    for count in range(1, len(left_out) + 1):
        places = [headings.index(heading) for heading in left_out[:count]]
        yield left_out[:count], _without_columns(section, places)


def _table(section: TextTable, layout: _Layout) -> Table:
    padding = (0, layout.apart)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, collapse_padding=True)
    for index, (heading, unit) in enumerate(section.columns):
        is_name = index < section.names
        # A heading has one word per line, so that eight columns of numbers fit a terminal.
        label = Text("\n".join([*heading.split(), unit]) if unit else heading)
        side: Literal["left", "right"] = "left" if is_name else "right"
        stays = not is_name or heading in HEADINGS.values()
        table.add_column(label, justify=side, overflow="fold", no_wrap=stays)
    for row, ranges in zip(section.rows, section.ranges, strict=True):
        if not layout.range_rows:
            table.add_row(*(_styled(*pair) for pair in zip(row, ranges, strict=True)))
            continue
        table.add_row(*map(_styled, row))
        if any(ranges):
            lows, _, highs = zip(*(spread.partition("..") for spread in ranges), strict=True)
            outcome = section.names - 1
            for what, ends in (("from", lows), ("to", highs)):
                table.add_row(*ends[:outcome], what, *ends[section.names :], style="dim")
    for column in table.columns:
        if column.no_wrap:  # rich would allow a break between the words of "x model"
            lines = "\n".join(map(str, (column.header, *column.cells))).split("\n")
            column.min_width = max(map(cell_len, lines))
    return table


def _styled(text: str, spread: str = "") -> Text:
    styled = Text(text, style=_STYLES.get(text.partition(" in ")[0], ""))
    return styled.append(f"\n{spread}", style="dim") if spread else styled


def _stacked(section: TextTable) -> TextTable:
    """Return the table with formats and options below the names of the strategies, to save width."""
    below = [at for at, (heading, _) in enumerate(section.columns) if heading in _BELOW_NAME]
    rows = []
    for row in section.rows:
        extra = [row[at] for at in below if row[at] not in ("-", row[0])]
        rows.append(["\n".join([row[0], *extra]), *row[1:]])
    return _without_columns(replace(section, names=section.names - len(below), rows=rows), below)


def _without_columns(section: TextTable, places: Sequence[int]) -> TextTable:
    """Return the table without the columns at ``places``; the caller adapts the field ``names``."""
    return replace(
        section,
        columns=_without(section.columns, places),
        rows=[_without(row, places) for row in section.rows],
        ranges=[_without(ranges, places) for ranges in section.ranges],
    )


def _without(row: Sequence[T], places: Sequence[int]) -> list[T]:
    return [value for at, value in enumerate(row) if at not in places]
