"""Tabulate a run with times as multiples of the first series' times, for runs on shared machines.

Memory figures are comparable between machines. Times are comparable only within one run; multiples
keep a reader from comparing times of different runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pandas as pd

from weighin.record import Result
from weighin.report import captions
from weighin.report.columns import figures_of, number_text
from weighin.report.dataframe import series, varying
from weighin.report.operations import BEFORE_LOAD
from weighin.report.tables import markdown_lines, text_table
from weighin.text import markdown as escaped

_TIMES: Final = ("load_s", "ready_s")
_SAME: Final = ("operation", "model", "device")  # times are compared where these are equal


def markdown_relative(results: Sequence[Result]) -> str:
    """Return the table, and below the table the first line's times in seconds."""
    frame = series(results)
    if frame.empty:
        return captions.shared(frame, results)
    figures = [one for one in figures_of(frame) if one.key not in BEFORE_LOAD]
    shown = [replace(one, unit="x") if one.key in _TIMES else one for one in figures]
    table = text_table("", _divided(frame), ["strategy", *varying(frame)], shown)
    first = frame.iloc[0]
    seconds = (
        f"{figure.heading} {number_text(first[figure.key], replace(figure, digits=1))} s"
        for figure in figures
        if figure.key in _TIMES
    )
    note = f"Times are multiples of the first line's: {', '.join(seconds)}."
    return "\n".join(
        [*markdown_lines(table), "", escaped(note), "", escaped(captions.shared(frame, results))]
    )


def _divided(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with each time divided by the time of the first comparable series."""
    comparable = frame.groupby(list(_SAME), sort=False)
    firsts = {key: comparable[key].transform("first") for key in _TIMES}
    columns = ((key, f"{key}{end}") for key in _TIMES for end in ("", "_min", "_max"))
    return frame.assign(**{column: frame[column] / firsts[key] for key, column in columns})
