"""Tabulate a run with times as multiples of the first series' times, for runs on shared machines.

Memory figures are comparable between machines. Times are comparable only within one run; multiples
keep a reader from comparing times of different runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from weighin.report import captions
from weighin.report.columns import figures_of
from weighin.report.operations import BEFORE_LOAD
from weighin.report.rows import Row, series, varying
from weighin.report.tables import markdown_lines, text_table
from weighin.result import Result
from weighin.text import markdown as escaped

_TIMES: Final = ("load_s", "ready_s")
_SAME: Final = ("operation", "model", "device")  # times are compared where these are equal


def markdown_relative(results: Sequence[Result]) -> str:
    """Return the table, and below the table the first line's times in seconds."""
    rows = series(results)
    if not rows:
        return captions.shared(rows, results)
    figures = [one for one in figures_of(rows) if one.key not in BEFORE_LOAD]
    shown = [replace(one, unit="x") if one.key in _TIMES else one for one in figures]
    table = text_table("", _divided(rows), ["strategy", *varying(rows)], shown)
    first = rows[0]
    seconds = (
        f"{figure.heading} {'-' if first[figure.key] is None else f'{first[figure.key]:.1f}'} s"
        for figure in figures
        if figure.key in _TIMES
    )
    note = f"Times are multiples of the first line's: {', '.join(seconds)}."
    return "\n".join(
        [*markdown_lines(table), "", escaped(note), "", escaped(captions.shared(rows, results))]
    )


def _divided(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with each time divided by the time of the first comparable series."""
    firsts: dict[tuple[str, ...], float] = {}
    for row in rows:
        for name in _TIMES:
            if row[name] is not None:
                firsts.setdefault((name, *(row[key] for key in _SAME)), row[name])
    return [
        row
        | {
            f"{name}{end}": row[f"{name}{end}"] / firsts[name, *(row[key] for key in _SAME)]
            for name in _TIMES
            for end in ("", "_min", "_max")
            if row[name] is not None
        }
        for row in rows
    ]
