"""Summarise a run as text tables, and write these tables as Markdown and as CSV.

A table has one row for the repeats of each measurement (a series). A property that differs between
rows, such as the dtype, is a column or a heading; a property that all rows share is in the caption.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TextIO

from weighin.report import captions, operations
from weighin.report.figures import COLUMNS, Column
from weighin.report.markdown import plain, table_lines
from weighin.report.operations import ABOVE_IMPORT
from weighin.report.rows import OF_SERIES, Row, has, is_below_import, series, varying
from weighin.result import Outcome, Result
from weighin.text import markdown as escaped

LEFT_OUT_FIRST: Final[tuple[str, ...]] = (
    "import", "cgroup peak of use", "forked process", "import transformers", "cgroup peak", "sum of peaks (misleading)", "files", "pinned",
    "CUDA requested", "CUDA driver (sampled)", "unreclaimable (sampled)", "written", "CUDA reserved",
    "above import", "above the model", "page cache (sampled)", "shared (sampled)", "exit code",
    "anonymous (sampled)", "peak RSS of use", "use",
)  # fmt: skip
"""Headings of the columns that a narrow terminal leaves out, in this order."""
HEADINGS: Final = {
    "ram_limit_bytes": "RAM limit",
    "vram_limit_bytes": "GPU limit",
    "disk_latency": "disk latency",
}
# A cell that begins with one of these characters is a formula in a spreadsheet.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_MESSAGE_LENGTH: Final = 300  # characters; records.jsonl contains the whole message
# Each combination of these properties has a table of its own, because its figures are not comparable.
_APART: Final = ("operation", "model", "device")


@dataclass(frozen=True, slots=True)
class TextTable:
    """One table as text, whose first ``names`` columns are names and whose other columns are numbers."""

    heading: str
    columns: list[tuple[str, str]]  # heading, unit
    names: int
    rows: list[list[str]]
    ranges: list[list[str]]  # the range of each median in ``rows``; "" without a range


def markdown_table(results: Sequence[Result]) -> str:
    """Return the tables of a run as Markdown, with the caption below the tables."""
    rows = series(results)
    lines = markdown_cells(rows, "**{}**")
    return "\n".join([*lines, escaped(captions.shared(rows, results))])


def markdown_cells(rows: Sequence[Row], heading: str) -> Iterator[str]:
    """Yield the lines of each table in Markdown; ``heading`` is a format string such as "### {}"."""
    for table in text_tables(rows):
        if table.heading:
            yield from (heading.format(escaped(table.heading)), "")
        yield from (*markdown_lines(table), "")


def write_summary(results: Sequence[Result], file: TextIO, missing: int | None = None) -> None:
    """Write a CSV line for each measurement, in bytes and unrounded seconds; "" if not measured.

    The last column, missing_cells, is ``missing``: the number of planned measurements without a
    record. A text that a spreadsheet would read as a formula gets a leading apostrophe.
    """
    rows = series(results)
    names = operations.concerning(rows, OF_SERIES)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*names, "missing_cells"])
    for row in rows:
        writer.writerow(_csv_cell(value) for value in (*(row[name] for name in names), missing))


def text_tables(rows: Sequence[Row]) -> Iterator[TextTable]:
    """Yield a table for each operation, model and device; other settings that differ are columns."""
    if not rows:
        return
    changing = varying(rows)
    by = [name for name in _APART if name in changing]
    names = ["strategy", *(name for name in changing if name not in by)]
    for heading, group in captions.apart(rows, by):
        yield text_table(heading, group, names, figures_of(group))


def text_table(
    heading: str, group: Sequence[Row], names: Sequence[str], figures: Sequence[Column]
) -> TextTable:
    """Return one table of these rows, with the columns ``names``, the outcome, and ``figures``."""
    titles = [(HEADINGS.get(name, name), "") for name in (*names, "outcome")]
    rows, ranges = [], []
    for row in group:
        texts = [*(name_text(name, row) for name in names), plain(captions.ending(row))]
        rows.append([*texts, *(figure_text(row, f) for f in figures)])
        ranges.append([""] * len(titles) + [range_text(row, f) for f in figures])
    columns = [*titles, *((f.heading, f.unit) for f in figures)]
    return TextTable(heading, columns, len(titles), rows, ranges)


def figures_of(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of numbers that a table of these rows needs."""
    kinds = operations.of(rows)
    keys = list(dict.fromkeys(key for kind in kinds for key in kind.figures))
    headings = kinds[0].headings if len(kinds) == 1 else {}
    return [
        replace(COLUMNS[key], heading=headings.get(key, COLUMNS[key].heading))
        for key in keys
        if (COLUMNS[key].is_usual or has(rows, key))
        and (key not in operations.OF_USES or captions.has_uses(rows))
        and (key != ABOVE_IMPORT or not is_below_import(rows))
    ]


def name_text(name: str, row: Row) -> str:
    """Return one property of a row as text, such as "8 GiB" for a RAM limit."""
    value = row[name]
    return captions.size(value) if name.endswith("_limit_bytes") else plain(str(value or "-"))


def figure_text(row: Row, figure: Column) -> str:
    """Return a figure of a row as text without the unit; "≥" precedes a lower bound."""
    text = figure.text(row[figure.key])
    return f"≥ {text}" if figure.at_least and text != "-" and row[figure.at_least] else text


def range_text(row: Row, figure: Column) -> str:
    """Return the range of a figure as text; empty if both ends of the range have the same text."""
    low, high = (figure.text(row[f"{figure.key}{end}"]) for end in ("_min", "_max"))
    return "" if low == high else f"{low}..{high}"


def markdown_lines(table: TextTable) -> Iterator[str]:
    """Yield the lines of a table in Markdown, with each range in parentheses after its median."""
    heads = [" ".join(filter(None, column)) for column in table.columns]
    pairs = (zip(*both, strict=True) for both in zip(table.rows, table.ranges, strict=True))
    rows = ([f"{text} ({spread})" if spread else text for text, spread in row] for row in pairs)
    return table_lines(heads, rows, names=table.names)


def what_went_wrong(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return, for each row that is not ok, its name and a text: outcome, last phase and reason."""
    names = ["strategy", *varying(rows)]
    troubles = []
    for row in (row for row in rows if row["outcome"] != Outcome.OK):
        title = " · ".join(name_text(name, row) for name in names)
        why = plain(row["message"])
        why = why if len(why) <= _MESSAGE_LENGTH else why[: _MESSAGE_LENGTH - 1] + "…"
        # Most messages already name the phase in which the measurement ended.
        names_phase = bool(row["last_phase"]) and repr(row["last_phase"]) in why
        ending = plain(row["outcome"] if names_phase else captions.ending(row))
        troubles.append((title, ending + (f": {why}" if why else "")))
    return troubles


def _csv_cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return int(value) if isinstance(value, float) and value.is_integer() else value
    text = plain(str(value))
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
