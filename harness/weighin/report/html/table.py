"""Build the summary as a table that a reader can sort and filter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weighin.record import Outcome
from weighin.report import captions, style
from weighin.report.columns import HEADINGS, figure_text, figures_of, name_text, range_text
from weighin.report.figures import Column
from weighin.report.markdown import plain
from weighin.report.rows import Row, varying

_SIGNS: Final = {Outcome.OK.value: "✓", Outcome.SKIPPED.value: "-"}


@dataclass(frozen=True, slots=True)
class TableColumn:
    heading: str
    unit: str
    is_number: bool


@dataclass(frozen=True, slots=True)
class Datum:
    """One field of the table; ``key`` is the sort key, which is empty if nothing was measured."""

    text: str
    key: str
    spread: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One series; ``outcome`` is the first word of its outcome, for colours and the filter."""

    id: str
    colour: str
    outcome: str
    data: list[Datum]


@dataclass(frozen=True, slots=True)
class Choice:
    """A filter of the table: its column, and the values to choose from."""

    heading: str
    column: int
    values: list[str]


@dataclass(frozen=True, slots=True)
class Table:
    columns: list[TableColumn]
    rows: list[TableRow]
    choices: list[Choice]


def ids(rows: Sequence[Row]) -> dict[str, str]:
    """Return an id for each series; its row, its bar and its timeline in the page share this id."""
    return {row["group"]: f"s{index}" for index, row in enumerate(rows)}


def build(series: Sequence[Row]) -> Table:
    """Return a table with one row per series; properties that all series share have no column."""
    names = ["strategy", *varying(series)]
    figures = figures_of(series)
    columns = [TableColumn(HEADINGS.get(name, name), "", is_number=False) for name in names]
    columns.append(TableColumn("outcome", "", is_number=False))
    columns += [TableColumn(f.heading, f.unit, is_number=True) for f in figures]
    series_ids = ids(series)
    rows = [_row(row, names, figures, series_ids) for row in series]
    choices = []
    for index, column in enumerate(columns[: len(names) + 1]):
        texts = list(dict.fromkeys(row.data[index].text for row in rows))
        if column.heading == "outcome":
            texts = list(dict.fromkeys(row.outcome for row in rows))
        if 1 < len(texts) <= 40:  # instead of a longer list, use the search field
            choices.append(Choice(column.heading, index, texts))
    return Table(columns, rows, choices)


def _row(row: Row, names: list[str], figures: list[Column], ids: Mapping[str, str]) -> TableRow:
    data = []
    for name in names:
        text = name_text(name, row)
        # A row without a limit sorts after all limits.
        limit = row[name] if name == "ram_limit_bytes" else None
        key = str(limit or 2**63) if name == "ram_limit_bytes" else text
        data.append(Datum(text, key))
    outcome = str(row["outcome"]).split(" ", maxsplit=1)[0]
    sign = _SIGNS.get(row["outcome"], "✗")
    data.append(Datum(f"{sign} {plain(captions.ending(row))}", outcome))
    for figure in figures:
        value = row[figure.key]
        key = "" if value is None else repr(float(value))
        data.append(Datum(figure_text(row, figure), key, range_text(row, figure)))
    return TableRow(ids[row["group"]], style.colour(row["strategy"]), outcome, data)
