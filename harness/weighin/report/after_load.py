"""Tabulate what the use of a model costs after its load: one row for each strategy, one column for each use.

Memory is a multiple of the model's size, above the memory after the imports.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.record import Outcome, Result
from weighin.records import after_load
from weighin.records.metrics import ready_anon
from weighin.records.repeats import middle
from weighin.report import captions
from weighin.report.blocks import Drawable, Found, ListEntry
from weighin.report.dataframe import known, series, varying
from weighin.report.markdown import plain, table_lines
from weighin.text import markdown as escaped
from weighin.uses import FORK, NONE

TITLE: Final = "After the load"
NOTE: Final = (
    "Anonymous memory, which the kernel cannot reclaim, above that after the imports, as a multiple of"
    " the model. Each column of a use: the most during the use (sampled), then that at its end (exact)."
)
_NOTE_FORK: Final = (
    "fork: the private memory that each of two forked processes adds to this (exact)."
)
_READY: Final = "loaded"
_TRAINED: Final = "adamw"
_MISSING: Final = "-"


def has_data(results: Sequence[Result]) -> bool:
    """Return whether a model was used in another way than by forward passes."""
    return any(result.cell.use for result in results)


def terminal_uses(results: Sequence[Result]) -> RenderableType:
    """Return the table for a terminal."""
    heads, rows, names = table(results)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, heading in enumerate(heads):
        drawn.add_column(heading, justify="left" if index < names else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return Group(drawn, *(Text(line, style="dim") for line in (*notes(results), caption(results))))


def markdown_uses(results: Sequence[Result]) -> str:
    """Return the table in markdown."""
    heads, rows, names = table(results)
    lines = [*notes(results), caption(results)]
    below = [text for line in lines for text in ("", escaped(line))]
    return "\n".join([*table_lines(heads, rows, names=names), *below])


def html_uses(results: Sequence[Result]) -> list[Drawable]:
    """Return the table as a block of report.html."""
    heads, rows, names = table(results)
    entries = [[ListEntry(text) for text in row] for row in rows]
    return [Found(TITLE, caption(results), heads, entries, names, notes(results))]


def markdown_trained(results: Sequence[Result]) -> str:
    """Return one line: the most memory of each strategy until ready, and in one step of AdamW."""
    lines = []
    for model in dict.fromkeys(result.cell.model.title for result in results):
        ours = [result for result in results if result.cell.model.title == model]
        steps = {
            strategy: (
                _multiple(group, _most_of_load),
                _multiple(group, after_load.most_anon_bytes),
            )
            for strategy, group in _by_strategy(ours).items()
        }
        texts = [f"{name} {before} → {after}" for name, (before, after) in steps.items()]
        lines.append(
            f"{model}, the most anonymous memory as a multiple of the model (sampled), until ready → in"
            f" one step of AdamW: {'; '.join(texts)}."
        )
    return "\n\n".join([*map(escaped, lines), escaped(captions.shared(series(results), results))])


def notes(results: Sequence[Result]) -> list[str]:
    """Return explanations of the table, one for each line."""
    return [NOTE, *([_NOTE_FORK] if any(one.cell.use == FORK for one in results) else [])]


def caption(results: Sequence[Result]) -> str:
    """Return the properties that all cells share."""
    return captions.shared(series(results), results, without=("use",))


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]], int]:
    """Return the headings, a row for each strategy, and the number of columns with names."""
    results = [one for one in results if one.cell.operation == "load"]
    frame = series(results)
    extra = [name for name in varying(frame) if name != "use"]
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.cell.series, []).append(result)
    uses = [use for use in dict.fromkeys(frame["use"]) if use != NONE]
    rows = [
        [*map(_name, ("strategy", *extra), values), *_cells(group, groups, uses)]
        for values, group in frame.groupby(["strategy", *extra], sort=False, dropna=False)
    ]
    heads = ["RAM limit" if name == "ram_limit_bytes" else name for name in extra]
    return ["strategy", *heads, _READY, *map(str, uses)], rows, 1 + len(extra)


def _name(name: str, value: Any) -> str:
    value = known(value)
    return captions.size(value) if name == "ram_limit_bytes" else plain(str(value or _MISSING))


def _cells(frame: pd.DataFrame, groups: dict[str, list[Result]], uses: Sequence[str]) -> list[str]:
    """Return the memory of one strategy after the load, and then for each use."""
    of_use = dict(zip(frame["use"], (groups[name] for name in frame["group"]), strict=True))
    everything = [result for group in of_use.values() for result in group]
    texts = [_use_text(of_use.get(use, [])) for use in uses]
    return [_multiple(everything, ready_anon), *texts]


def _use_text(repeats: Sequence[Result]) -> str:
    good = [result for result in repeats if result.outcome is Outcome.OK]
    if not good:
        ended = [one.outcome.value for one in repeats if one.outcome is not Outcome.SKIPPED]
        return ", ".join(dict.fromkeys(ended)) or _MISSING
    if children := [size for one in good if (size := after_load.child_private_bytes(one))]:
        size = good[0].model_bytes
        return f"+{max(children) / size:.2f}" if size else _MISSING
    return f"{_multiple(good, after_load.most_anon_bytes)} {_multiple(good, after_load.anon_bytes)}"


def _most_of_load(result: Result) -> int | None:
    return result.peaks.anon_sampled_bytes


def _multiple(results: Sequence[Result], read: Callable[[Result], int | None]) -> str:
    """Return the median of a figure as a multiple of the model, above the baseline."""
    found = middle(after_load.per_model(result, read(result)) for result in results)
    return _MISSING if found is None else f"{max(found, 0.0):.2f}"


def _by_strategy(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.cell.use == _TRAINED and result.outcome is Outcome.OK:
            groups.setdefault(result.cell.strategy, []).append(result)
    return groups
