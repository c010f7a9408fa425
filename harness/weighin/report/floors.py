"""Render RAM floors as a table for the terminal and as markdown."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.record import Result
from weighin.records.floor import KILLED, Aim, Floor, Life, floors
from weighin.records.verdict import Verdict
from weighin.report import captions, operations
from weighin.report.blocks import Drawable, Found, ListEntry
from weighin.report.dataframe import series
from weighin.report.markdown import table_lines
from weighin.report.operations import Kind
from weighin.report.survival import SIGNS, STYLES
from weighin.text import markdown as escaped
from weighin.units import GIB, MIB, format_seconds

_NAME: Final = ("strategy", "")
_PER_MODEL: Final = ("floor", "x model")
_ABOVE_IMPORT: Final = ("above import", "x model")
HEADINGS: Final = (
    _NAME,
    ("RAM floor", "GiB"),
    _PER_MODEL,
    _ABOVE_IMPORT,
    ("one step", "below"),
    ("at the floor", "ready"),
    ("at 1.1x", "ready"),
    ("no limit", "ready"),
)
NAMES: Final = 1
ENDS: Final = " (ends)"
"""Marks a floor under which a load thrashes, but ends."""


def has_data(results: Sequence[Result]) -> bool:
    """Return whether these results contain at least one floor."""
    return any(floor.bytes is not None for floor in floors(results))


def terminal_floors(results: Sequence[Result]) -> RenderableType:
    """Return the floors for a terminal, with the figures behind each verdict."""
    searched = floors(results)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, (heading, unit) in enumerate(_headings(searched)):
        text = Text("\n".join([*heading.split(), unit]) if unit else heading)
        table.add_column(text, justify="left" if index < NAMES else "right", overflow="fold")
    for floor in searched:
        table.add_row(*(_styled(text) for text in row(floor, searched)))
    parts: list[RenderableType] = [table]
    parts += [Text(line) for line in reasons(searched)]
    parts += [Text(line, style="dim") for line in (caption(results), *notes(searched))]
    return Group(*parts)


def markdown_floors(results: Sequence[Result]) -> str:
    """Return the floors as a markdown table with its caption below."""
    searched = floors(results)
    heads = [f"{heading} {unit}".strip() for heading, unit in _headings(searched)]
    rows = [row(floor, searched) for floor in searched]
    return "\n".join([*table_lines(heads, rows, names=NAMES), "", escaped(caption(results))])


def markdown_reasons(results: Sequence[Result]) -> str:
    """Return ``markdown_floors`` with the figures behind each verdict and notes on the columns."""
    searched = floors(results)
    lines = [*reasons(searched), *notes(searched)]
    return "\n".join([markdown_floors(results), "", *(f"- {escaped(line)}" for line in lines)])


def html_floors(results: Sequence[Result]) -> list[Drawable]:
    """Return the floors as a block of report.html, with the figures behind each verdict."""
    searched = floors(results)
    heads = [f"{heading} {unit}".strip() for heading, unit in _headings(searched)]
    rows = [[_entry(text) for text in row(floor, searched)] for floor in searched]
    explanations = [*notes(searched), *reasons(searched)]
    return [Found("RAM floors", caption(results), heads, rows, NAMES, explanations)]


def markdown_agreement(runs: Mapping[str, Sequence[Result]]) -> str:
    """Return a table with the floors of several searches side by side, and their differences.

    ``runs`` maps the name of each search to its results.
    """
    searches = {
        name: {floor.cell.strategy: floor for floor in floors(results)}
        for name, results in runs.items()
    }
    names = list(dict.fromkeys(strategy for search in searches.values() for strategy in search))
    rows = []
    for strategy in names:
        of_strategy = [search.get(strategy) for search in searches.values()]
        sizes = [size for floor in of_strategy if floor and (size := floor.bytes) is not None]
        difference = max(sizes) - min(sizes) if len(sizes) > 1 else None
        share = f" ({difference / min(sizes):.1%})" if difference is not None else ""
        rows.append([strategy, *map(_floor_text, of_strategy), _scaled(difference, MIB, 0) + share])
    heads = ["floor, MiB", *searches, "difference, MiB"]
    note = (
        "One step below its floor, a load was killed for lack of memory, unless the table names"
        " another outcome."
    )
    everything = [result for results in runs.values() for result in results]
    return "\n".join(
        [*table_lines(heads, rows, names=1), "", note, "", escaped(caption(everything))]
    )


def _floor_text(floor: Floor | None) -> str:
    """Return a floor in MiB, with the outcome one step below the floor unless that is "killed"."""
    if floor is None or floor.bytes is None:
        return "-"
    mark = ENDS if floor.aim is Aim.ENDS else ""
    below = f" ({floor.below})" if floor.below != KILLED else ""
    return _scaled(floor.bytes, MIB, 0) + mark + below


def as_dict(floor: Floor) -> dict[str, Any]:
    """Return a floor for ``--json``: bytes and nanoseconds; None means not found."""
    cell = floor.cell
    lives = {"unlimited": floor.unlimited, "at_floor": floor.at_floor, "with_room": floor.with_room}
    return {
        "strategy": cell.strategy,
        "model": cell.model.title,
        "isolation": cell.isolation,
        "device": cell.device,
        "dtype": cell.dtype,
        "format": cell.format,
        "use": cell.after_load,
        "options": cell.options,
        "environment": cell.environment,
        "floor_bytes": floor.bytes,
        "message": floor.message,
        "step_bytes": floor.step_bytes,
        "below": floor.below,
        "aim": floor.aim.value,
        "passed": floor.passed,
        "failed": floor.failed,
        "model_bytes": floor.model_bytes,
        "import_bytes": floor.import_bytes,
        "floor_per_model": floor.per_model,
        "above_import_per_model": floor.above_import_per_model,
        "cells": floor.cells,
    } | {name: _life_as_dict(life) for name, life in lives.items()}


def _life_as_dict(life: Life | None) -> dict[str, Any] | None:
    if life is None:
        return None
    judgement = life.judgement
    return {
        "limit_bytes": life.limit_bytes,
        "ready_ns": life.ready_ns,
        "times": life.times,
        "verdict": judgement.verdict.value if judgement else None,
        "reason": judgement.reason if judgement else "",
    }


def reasons(searched: Iterable[Floor]) -> list[str]:
    """Return a line with the reason for each missing floor, and the figures behind each verdict."""
    lines = []
    for floor in searched:
        if floor.message:
            lines.append(f"{floor.cell.strategy}: no floor: {floor.message}")
        for where, life in (("at the floor", floor.at_floor), ("at 1.1x", floor.with_room)):
            if life and life.judgement:
                verdict, reason = life.judgement.verdict, life.judgement.reason
                lines.append(f"{floor.cell.strategy} {where} {verdict}: {reason}")
    return lines


def notes(searched: Sequence[Floor]) -> list[str]:
    """Return explanations of the columns of the table of floors."""
    cells = sum(floor.cells for floor in searched)
    is_shown = _ABOVE_IMPORT in _headings(searched)
    kind = _kind(searched)
    above = "above import: (floor - anonymous memory after `import torch`) / the model's size."
    found = {floor.aim for floor in searched if floor.bytes is not None}
    return [
        kind.floor,
        *([kind.floor_ends] if Aim.ENDS in found else []),
        *([above if is_shown else captions.BELOW_IMPORT] if kind.computed else []),
        f"{kind.floor_ready} The search ran {cells} cells in all.",
    ]


def caption(results: Sequence[Result]) -> str:
    """Return the properties that all cells share, without the limit."""
    return captions.shared(series(results), results, without=("ram_limit_bytes",))


def row(floor: Floor, searched: Sequence[Floor]) -> list[str]:
    texts = [
        label(floor, searched),
        _scaled(floor.bytes, GIB, 3) + (ENDS if floor.bytes and floor.aim is Aim.ENDS else ""),
        _scaled(floor.per_model, 1, 2),
        _scaled(floor.above_import_per_model, 1, 2),
        _below(floor),
        _lived(floor.at_floor),
        _lived(floor.with_room),
        _lived(floor.unlimited),
    ]
    shown = _headings(searched)
    titles = _titled(_kind(searched))
    return [text for text, heading in zip(texts, titles, strict=True) if heading in shown]


def _kind(searched: Sequence[Floor]) -> Kind:
    return operations.KINDS[searched[0].cell.operation if searched else operations.USUAL]


def _headings(searched: Sequence[Floor]) -> list[tuple[str, str]]:
    """Return the headings of these floors.

    Without a model, no figure is a multiple of it, and "above import" is left out if every model is
    smaller than the import.
    """
    kind = _kind(searched)
    if not kind.computed:
        return [each for each in _titled(kind) if each not in (_PER_MODEL, _ABOVE_IMPORT)]
    sizes = [(floor.model_bytes, floor.import_bytes) for floor in searched]
    known = [(model, imported) for model, imported in sizes if model and imported]
    is_left_out = bool(known) and all(model < imported for model, imported in known)
    return [each for each in _titled(kind) if each != _ABOVE_IMPORT or not is_left_out]


def _titled(kind: Kind) -> list[tuple[str, str]]:
    return [(kind.words["what"], "") if each == _NAME else each for each in HEADINGS]


def _below(floor: Floor) -> str:
    """Return the size of the step below the floor, and how the load failed one step below."""
    return f"{_scaled(floor.step_bytes, MIB, 0)} MiB: {floor.below}" if floor.bytes else "-"


def label(floor: Floor, searched: Sequence[Floor]) -> str:
    """Return the strategy's name, with the properties that distinguish floors of the same strategy."""
    cell = floor.cell
    same = [other.cell for other in searched if other.cell.strategy == cell.strategy]
    words = [cell.strategy]
    for name in ("format", "options", "model", "isolation", "after_load"):
        value = getattr(cell, name)
        if any(getattr(other, name) != value for other in same):
            texts = {
                "options": ", ".join(f"{k}={v}" for k, v in cell.options.items()),
                "model": cell.model.title,
            }
            words.append(texts.get(name, value))
    return " ".join(words)


def _scaled(value: float | None, scale: int, digits: int) -> str:
    return "-" if value is None else f"{value / scale:.{digits}f}"


def _lived(life: Life | None) -> str:
    if life is None:
        return "-"
    words = ["-" if life.ready_ns is None else format_seconds(life.ready_ns)]
    if life.judgement:
        words += [f"{life.times:.1f}x"] if life.times else []
        words.append(life.judgement.verdict.value)
    return " ".join(words)


def _entry(text: str) -> ListEntry:
    last = text.rpartition(" ")[2]
    return ListEntry(text, last, SIGNS[Verdict(last)]) if last in STYLES else ListEntry(text)


def _styled(text: str) -> Text:
    """Return a text broken into short lines, so that nine columns fit into 80 characters."""
    before, _, last = text.rpartition(" ")
    if last in STYLES:
        time, _, times = before.rpartition(" ")
        lines = [time, times, last] if times.endswith("x") else [before, last]
        return Text("\n".join(lines), style=STYLES[Verdict(last)])
    return Text(re.sub(r": (timed out) (after) ", r":\n\1\n\2\n", text).replace(ENDS, "\n(ends)"))
