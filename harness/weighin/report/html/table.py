"""Compute the table of all results in report.html, which a reader can sort and filter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from weighin.report import style
from weighin.report.rows import Row, varying
from weighin.report.tables import figures_of, name_text, text_table
from weighin.result import Outcome

_SIGNS: Final = {Outcome.OK.value: "✓", Outcome.SKIPPED.value: "-"}


@dataclass(frozen=True, slots=True)
class Datum:
    """One field of the table; the page sorts rows by ``key``, which is "" if nothing was measured."""

    text: str
    key: str
    spread: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of the table; ``outcome`` is the first word of the row's outcome, such as "timeout"."""

    id: str
    colour: str
    outcome: str
    data: list[Datum]


@dataclass(frozen=True, slots=True)
class Choice:
    """A filter of the table: a column, and the values from which the reader of the page chooses."""

    heading: str
    column: int
    values: list[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first ``names`` columns are names and whose other columns are numbers."""

    columns: list[tuple[str, str]]  # heading, unit
    names: int
    rows: list[TableRow]
    choices: list[Choice]


def ids(rows: Sequence[Row]) -> dict[str, str]:
    """Return an id for each measurement, which connects its row, bar and timeline in the page."""
    return {row["group"]: f"s{index}" for index, row in enumerate(rows)}


def build(series: Sequence[Row]) -> Table:
    """Return the table; a property that all rows share has no column."""
    names, figures, series_ids = ["strategy", *varying(series)], figures_of(series), ids(series)
    table = text_table("", series, names, figures)
    rows = []
    for row, texts, ranges in zip(series, table.rows, table.ranges, strict=True):
        outcome = str(row["outcome"]).split(" ", maxsplit=1)[0]
        numbers = (row[figure.key] for figure in figures)
        keys = [_key(name, row) for name in names]
        keys += [outcome, *("" if number is None else repr(float(number)) for number in numbers)]
        data = [Datum(*fields) for fields in zip(texts, keys, ranges, strict=True)]
        sign = _SIGNS.get(row["outcome"], "✗")
        data[len(names)] = replace(data[len(names)], text=f"{sign} {data[len(names)].text}")
        rows.append(
            TableRow(series_ids[row["group"]], style.colour(row["strategy"]), outcome, data)
        )
    choices = []
    for index, (heading, _) in enumerate(table.columns[: table.names]):
        values = list(dict.fromkeys(row.data[index].text for row in rows))
        if heading == "outcome":
            values = list(dict.fromkeys(row.outcome for row in rows))
        if 1 < len(values) <= 40:  # a longer list is harder to use than the search field
            choices.append(Choice(heading, index, values))
    return Table(table.columns, table.names, rows, choices)


def _key(name: str, row: Row) -> str:
    """Return the text by which the column ``name`` is sorted; no RAM limit counts as a very large one."""
    return str(row[name] or 2**63) if name == "ram_limit_bytes" else name_text(name, row)
