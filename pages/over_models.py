"""Tabulate the time of each strategy over the models of a run: one column for each model."""

from collections.abc import Sequence
from typing import Final

from weighin.report import captions
from weighin.report.markdown import table_lines
from weighin.report.rows import series, split, values
from weighin.result import Result
from weighin.text import markdown as escaped

_MISSING: Final = "-"


def markdown_models(results: Sequence[Result]) -> str:
    """Return a table of the times until ready in seconds, medians of the repeats, and its caption."""
    rows = series(results)
    if not rows:
        return captions.shared(rows, results)
    models, texts = values(rows, "model"), []
    for (strategy,), group in split(rows, ["strategy"]).items():
        ready = {row["model"]: row["ready_s"] for row in group}
        texts.append([strategy, *(_text(ready.get(model)) for model in models)])
    lines = table_lines(["strategy", *(f"{model} s" for model in models)], texts, names=1)
    return "\n".join([*lines, "", escaped(captions.shared(rows, results))])


def _text(seconds: float | None) -> str:
    return _MISSING if seconds is None else f"{seconds:.2f}"
