"""Tabulate the time of each strategy over the models of a run: one column for each model."""

from collections.abc import Sequence
from typing import Final

import pandas as pd

from weighin.record import Result
from weighin.report import captions
from weighin.report.dataframe import series
from weighin.report.markdown import table_lines
from weighin.text import markdown as escaped

_MISSING: Final = "-"


def markdown_models(results: Sequence[Result]) -> str:
    """Return a table of the times until ready in seconds, medians of the repeats, and its caption."""
    frame = series(results)
    if frame.empty:
        return captions.shared(frame, results)
    models = list(dict.fromkeys(frame["model"]))
    rows = []
    for strategy, group in frame.groupby("strategy", sort=False):
        ready = dict(zip(group["model"], group["ready_s"], strict=True))
        rows.append([str(strategy), *(_text(ready.get(model)) for model in models)])
    lines = table_lines(["strategy", *(f"{model} s" for model in models)], rows, names=1)
    return "\n".join([*lines, "", escaped(captions.shared(frame, results))])


def _text(seconds: float | None) -> str:
    return _MISSING if seconds is None or pd.isna(seconds) else f"{seconds:.2f}"
