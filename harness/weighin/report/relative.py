"""The table of a run with times as multiples of the first series' times, for runs on shared machines.

Memory figures are comparable between machines. Times are comparable only within one run; multiples
keep a reader from comparing them with those of another run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pandas as pd

from weighin.record import Result
from weighin.report import captions
from weighin.report.columns import HEADINGS, Column, figures_of, name_text, number_text, range_text
from weighin.report.dataframe import series, varying
from weighin.report.markdown import plain, table_lines
from weighin.text import markdown as escaped

_TIMES: Final = ("load_s", "ready_s")
_SAME: Final = ("operation", "model", "device")  # times are compared where these are equal


def markdown_relative(results: Sequence[Result]) -> str:
    """Return the table, with the times of the first line in seconds below it."""
    frame = series(results)
    if frame.empty:
        return captions.shared(frame, results)
    names, figures = ["strategy", *varying(frame)], figures_of(frame)
    rows = []
    for _, row in _divided(frame).iterrows():
        texts = [*(name_text(name, row) for name in names), plain(captions.ending(row))]
        for figure in figures:
            spread = range_text(row, figure)
            texts.append(number_text(row[figure.key], figure) + (f" ({spread})" if spread else ""))
        rows.append(texts)
    heads = [*(HEADINGS.get(name, name) for name in names), "outcome"]
    heads += [f"{figure.heading} {_unit(figure)}".strip() for figure in figures]
    lines = table_lines(heads, rows, names=len(names) + 1)
    first = frame.iloc[0]
    seconds = (
        f"{figure.heading} {number_text(first[figure.key], replace(figure, digits=1))} s"
        for figure in figures
        if figure.key in _TIMES
    )
    note = f"Times are multiples of the first line's: {', '.join(seconds)}."
    return "\n".join([*lines, "", escaped(note), "", escaped(captions.shared(frame, results))])


def _divided(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with each time divided by that of the first comparable series."""
    comparable = frame.groupby(list(_SAME), sort=False)
    firsts = {key: comparable[key].transform("first") for key in _TIMES}
    columns = ((key, f"{key}{end}") for key in _TIMES for end in ("", "_min", "_max"))
    return frame.assign(**{column: frame[column] / firsts[key] for key, column in columns})


def _unit(figure: Column) -> str:
    return "x" if figure.key in _TIMES else figure.unit
