"""Tabulate RAM floors: the smallest RAM limit under which each strategy loads the model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from weighin.records.floor import Aim, Floor, floors
from weighin.records.series import label_among
from weighin.records.verdict import Typical
from weighin.report import captions, operations
from weighin.report.findings import Entry, Found
from weighin.report.markdown import scaled
from weighin.report.operations import Kind
from weighin.report.rows import series
from weighin.report.survival import SIGNS
from weighin.result import Result
from weighin.units import GIB, MIB, format_seconds

_PER_MODEL: Final = "floor\nx model"
_ABOVE_IMPORT: Final = "above\nimport\nx model"
ENDS: Final = "\n(ends)"
"""The mark after a RAM floor under which the load ends ok, but may thrash."""


def has_data(results: Sequence[Result]) -> bool:
    """Return whether a search found the smallest RAM limit of at least one strategy."""
    return any(floor.bytes is not None for floor in floors(results))


def found(results: Sequence[Result]) -> list[Found]:
    """Return the table of RAM floors, with lines that explain the verdicts and the columns."""
    searched = floors(results)
    columns = _columns(searched)
    rows = [[entry(floor) for entry in columns.values()] for floor in searched]
    caption = captions.shared(series(results), results, without=("ram_limit_bytes",))
    lines = [*_reasons(searched), *_notes(searched)]
    return [Found("RAM floors", [*columns], rows, 1, caption, reasons=lines)]


def as_dict(floor: Floor) -> dict[str, Any]:
    """Return a RAM floor for ``--json``; ``floor_bytes`` is None if the search found no floor."""
    cell = floor.cell
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
        "unlimited": _typical_as_dict(floor.unlimited, None),
        "at_floor": _typical_as_dict(floor.at_floor, floor.times(floor.at_floor)),
        "with_room": _typical_as_dict(floor.with_room, floor.times(floor.with_room)),
    }


def _typical_as_dict(typical: Typical | None, times: float | None) -> dict[str, Any] | None:
    if typical is None:
        return None
    judgement = typical.judgement
    return {
        "limit_bytes": typical.result.cell.ram_limit_bytes,
        "ready_ns": typical.result.ready_ns,
        "times": times,
        "verdict": judgement.verdict.value if judgement else None,
        "reason": judgement.reason if judgement else "",
    }


def _reasons(searched: Iterable[Floor]) -> list[str]:
    """Return a line for each floor that was not found, and a line for each verdict with its reason."""
    lines = []
    for floor in searched:
        if floor.message:
            lines.append(f"{floor.cell.strategy}: no floor: {floor.message}")
        for where, typical in (("at the floor", floor.at_floor), ("at 1.1x", floor.with_room)):
            if typical and typical.judgement:
                verdict, reason = typical.judgement.verdict, typical.judgement.reason
                lines.append(f"{floor.cell.strategy} {where} {verdict}: {reason}")
    return lines


def _notes(searched: Sequence[Floor]) -> list[str]:
    """Return explanations of the columns of the table of floors."""
    cells = sum(floor.cells for floor in searched)
    kind = _kind(searched)
    above = "above import: (floor - anonymous memory after `import torch`) / the model's size."
    found = {floor.aim for floor in searched if floor.bytes is not None}
    return [
        kind.floor,
        *([kind.floor_ends] if Aim.ENDS in found else []),
        *(
            [captions.BELOW_IMPORT if _is_below_import(searched) else above]
            if kind.computed
            else []
        ),
        f"{kind.floor_ready} The search ran {cells} cells in all.",
    ]


def _columns(searched: Sequence[Floor]) -> dict[str, Callable[[Floor], Entry]]:
    """Return the table's columns by heading; for commands, none with multiples of a model's size."""
    kind = _kind(searched)
    columns: dict[str, Callable[[Floor], Entry]] = {
        kind.words["what"]: lambda one: Entry(label(one, searched)),
        "RAM\nfloor\nGiB": lambda one: Entry(scaled(one.bytes, GIB, 3) + _ending(one)),
        _PER_MODEL: lambda one: Entry(scaled(one.per_model, 1, 2)),
        _ABOVE_IMPORT: lambda one: Entry(scaled(one.above_import_per_model, 1, 2)),
        "one\nstep\nbelow": lambda one: Entry(_below(one)),
        "at\nthe\nfloor\nready": lambda one: _lived(one, one.at_floor),
        "at\n1.1x\nready": lambda one: _lived(one, one.with_room),
        "no\nlimit\nready": lambda one: _lived(one, one.unlimited),
    }
    if not kind.computed or _is_below_import(searched):
        del columns[_ABOVE_IMPORT]
    if not kind.computed:
        del columns[_PER_MODEL]
    return columns


def _ending(floor: Floor) -> str:
    return ENDS if floor.bytes and floor.aim is Aim.ENDS else ""


def _kind(searched: Sequence[Floor]) -> Kind:
    return operations.KINDS[searched[0].cell.operation if searched else operations.USUAL]


def _is_below_import(searched: Sequence[Floor]) -> bool:
    """Return whether every model is smaller than the memory of ``import torch``."""
    sizes = [(floor.model_bytes, floor.import_bytes) for floor in searched]
    known = [(model, imported) for model, imported in sizes if model and imported]
    return bool(known) and all(model < imported for model, imported in known)


def _below(floor: Floor) -> str:
    """Return the search's last step in MiB, and how the load failed at one step below the floor."""
    how = floor.below.replace("out after ", "out\nafter\n")
    return f"{scaled(floor.step_bytes, MIB, 0)} MiB:\n{how}" if floor.bytes else "-"


def label(floor: Floor, searched: Sequence[Floor]) -> str:
    """Return the strategy's name, with the settings that differ among the strategy's floors."""
    cell, cells = floor.cell, [each.cell for each in searched]
    same = [other for other in cells if other.strategy == cell.strategy]
    words = [label_among(cell, cells)]
    if any(other.model != cell.model for other in same):
        words.append(cell.model.title)
    if any(other.isolation != cell.isolation for other in same):
        words.append(cell.isolation)
    if any(other.after_load != cell.after_load for other in same):
        words.append(cell.after_load)
    return " ".join(words)


def _lived(floor: Floor, typical: Typical | None) -> Entry:
    if typical is None:
        return Entry("-")
    ready_ns, times = typical.result.ready_ns, floor.times(typical)
    words = ["-" if ready_ns is None else format_seconds(ready_ns)]
    if typical.judgement is None:
        return Entry(words[0])
    verdict = typical.judgement.verdict
    words += [f"{times:.1f}x"] if times else []
    return Entry("\n".join([*words, verdict]), verdict.value, SIGNS[verdict])
