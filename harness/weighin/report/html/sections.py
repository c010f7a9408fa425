"""The findings of a run as blocks of the page; see ``report.findings``."""

from collections.abc import Iterator, Sequence
from typing import Final

from weighin.record import Outcome, Result
from weighin.records.floor import floors as all_floors
from weighin.records.survival import Field, Matrix, matrices
from weighin.records.verdict import Verdict
from weighin.report import floors, notebook, passes, survival
from weighin.report.html.blocks import Drawable, Found, ListEntry

_SIGNS: Final = {Verdict.SURVIVES: "✓", Verdict.THRASHES: "≈", Verdict.KILLED: "✗"}
_PLAIN: Final = ""


def of_passes(results: Sequence[Result]) -> list[Drawable]:
    """Return the forward passes of each series."""
    names, rows = passes.table(results)
    entries = [[ListEntry(text) for text in row] for row in rows]
    heads, caption = passes.headings(names, rows), passes.caption(results)
    return [Found("Forward passes", caption, heads, entries, len(names), [passes.NOTE])]


def of_survival(results: Sequence[Result]) -> list[Drawable]:
    """Return the survival matrices, one table each."""
    return [_survival(matrix, results) for matrix in matrices(results)]


def of_notebook(results: Sequence[Result]) -> list[Drawable]:
    """Return the notebook's published figures beside ours, and why they differ."""
    rows = [[ListEntry(text) for text in row] for row in notebook.rows(results)]
    notes = [f"{name}: {reason}" for name, reason in notebook.differences(results)]
    label, notes = "The notebook's published figures", [notebook.ABOUT, *notes]
    caption = notebook.caption(results)
    return [Found(label, caption, notebook.HEADINGS, rows, notebook.NAMES, notes)]


def of_floors(results: Sequence[Result]) -> list[Drawable]:
    """Return the RAM floors, with the figures behind each verdict."""
    found = all_floors(results)
    heads = [f"{heading} {unit}".strip() for heading, unit in floors.HEADINGS]
    rows = [[_floor_entry(text) for text in floors.row(floor, found)] for floor in found]
    notes = [*floors.notes(found), *floors.reasons(found)]
    return [Found("RAM floors", floors.caption(results), heads, rows, floors.NAMES, notes)]


def _survival(matrix: Matrix, results: Sequence[Result]) -> Found:
    heads = ["strategy", *(survival.heading(limit) for limit in matrix.limits)]
    rows = [
        [ListEntry(matrix.label(row)), *_fields(matrix, row)] for row in range(len(matrix.rows))
    ]
    caption, notes = survival.caption(matrix, results), survival.notes(results)
    return Found("Survival under each limit", caption, heads, rows, 1, notes)


def _fields(matrix: Matrix, row: int) -> Iterator[ListEntry]:
    for column, limit in enumerate(matrix.limits):
        field = matrix.field(row, column)
        if field is None:
            yield ListEntry("not measured")
            continue
        name = f"{matrix.label(row)}, {survival.heading(limit)}"
        yield _entry(field, name)


def _entry(field: Field, name: str) -> ListEntry:
    judgement, outcome = field.judgement, field.result.outcome
    if judgement:
        tip = f"{name}: {judgement.verdict}\n{judgement.reason}"
        return ListEntry(field.words, judgement.verdict.value, _SIGNS[judgement.verdict], tip)
    if outcome is Outcome.OK:
        return ListEntry(field.words, Verdict.SURVIVES.value, "✓", f"{name}: ok")
    tip = f"{name}: {outcome}\n{field.result.message}".rstrip()
    return ListEntry(field.words, "skipped" if outcome is Outcome.SKIPPED else "failed", "✗", tip)


def _floor_entry(text: str) -> ListEntry:
    last = text.rpartition(" ")[2]
    kind = last if last in {verdict.value for verdict in Verdict} else _PLAIN
    return ListEntry(text, kind, _SIGNS[Verdict(kind)] if kind else "")
