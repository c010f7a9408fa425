"""The summary of a run as tables of text, and these as markdown and as CSV.

One row a series. What varies between the cells is a column or a heading, what does not is in the
caption. Reporters take data and an open file.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

import pandas as pd

from weighin.record import Outcome, Result
from weighin.report import captions
from weighin.report.columns import HEADINGS, figures_of, name_text, number_text, range_text
from weighin.report.dataframe import known, series, varying
from weighin.report.markdown import plain, table_lines
from weighin.text import markdown as escaped

# What spreadsheets take for a formula; some take the wide letters of East Asian fonts, too.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_MESSAGE_LENGTH: Final = 300  # the record has the whole message
# Figures under different values of these are not comparable: each gets a table of its own.
_APART: Final = ("operation", "model", "device")


@dataclass(frozen=True, slots=True)
class TextTable:
    """One table as text: names left of ``names`` columns, numbers right of them."""

    heading: str
    columns: list[tuple[str, str]]  # heading, unit
    names: int
    rows: list[list[str]]
    ranges: list[list[str]]  # the range behind each median, or ""


def markdown_table(results: Sequence[Result]) -> str:
    """Return the table, or tables, of a run, with the caption below."""
    frame = series(results)
    lines = [*markdown_cells(frame, "**{}**")] if not frame.empty else []
    return "\n".join([*lines, escaped(captions.shared(frame, results))])


def markdown_cells(frame: pd.DataFrame, heading: str) -> Iterator[str]:
    """Yield the lines of each table; ``heading`` has a place for what sets it apart from others."""
    for table in text_tables(frame):
        if table.heading:
            yield from (heading.format(escaped(table.heading)), "")
        yield from (*_markdown_lines(table), "")


def write_summary(results: Sequence[Result], file: TextIO) -> None:
    """Write one CSV line a series: bytes and seconds, unrounded; nothing for what is missing.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    frame = series(results).drop(columns="group")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(frame.columns)
    for row in frame.to_dict("records"):
        writer.writerow(_csv_cell(known(value)) for value in row.values())


def text_tables(frame: pd.DataFrame) -> Iterator[TextTable]:
    """Yield a table for each operation, model and device; what else varies is a column of names."""
    if frame.empty:
        return
    changing = varying(frame)
    by = [name for name in _APART if name in changing]
    names = ["strategy", *(name for name in changing if name not in by)]
    groups = frame.groupby(by, sort=False) if by else [((), frame)]
    for values, group in groups:
        size = captions.model_size(group)
        pairs = zip(by, values, strict=True)
        heading = " · ".join(captions.dimension(name, value, size) for name, value in pairs)
        yield _section(heading, group, names)


def _section(heading: str, group: pd.DataFrame, names: list[str]) -> TextTable:
    figures = figures_of(group)
    titles = [(HEADINGS.get(name, name), "") for name in (*names, "outcome")]
    rows, ranges = [], []
    for _, row in group.iterrows():
        texts = [*(name_text(name, row) for name in names), plain(captions.ending(row))]
        rows.append([*texts, *(number_text(row[f.key], f) for f in figures)])
        ranges.append([""] * len(titles) + [range_text(row, f) for f in figures])
    columns = [*titles, *((f.heading, f.unit) for f in figures)]
    return TextTable(heading, columns, len(titles), rows, ranges)


def _markdown_lines(table: TextTable) -> Iterator[str]:
    heads = [" ".join(filter(None, column)) for column in table.columns]
    pairs = (zip(*both, strict=True) for both in zip(table.rows, table.ranges, strict=True))
    rows = ([f"{text} ({spread})" if spread else text for text, spread in row] for row in pairs)
    return table_lines(heads, rows, names=table.names)


def what_went_wrong(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """What happened to each series that is not ok: its name, and where and why it ended."""
    names = ["strategy", *varying(frame)]
    troubles = []
    for _, row in frame[frame["outcome"] != Outcome.OK.value].iterrows():
        who = " · ".join(name_text(name, row) for name in names)
        why = plain(row["message"])
        why = why if len(why) <= _MESSAGE_LENGTH else why[: _MESSAGE_LENGTH - 1] + "…"
        # Most messages name the phase themselves.
        is_told = bool(known(row["last_phase"])) and repr(row["last_phase"]) in why
        what = plain(row["outcome"] if is_told else captions.ending(row))
        troubles.append((who, what + (f": {why}" if why else "")))
    return troubles


def note_lines(frame: pd.DataFrame) -> list[str]:
    """Return what the figures are and how they were come by, a sentence a line."""
    if frame.empty:
        return []
    repeats = int(frame["repeats"].max())
    return captions.note_figures(
        doing=captions.doing(frame),
        cuda=bool(frame["peak_cuda_allocated_bytes"].notna().any()),
        repeats=repeats,
    )


def _csv_cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    text = plain(str(value))
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
