"""What a run has found beside its table: forward passes, survival under limits, RAM floors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from harness.floor import floors as all_floors
from harness.record import Outcome, Result
from harness.report import findings, floors, passes, survival
from harness.survival import Field, Matrix, matrices
from harness.verdict import Verdict

_SIGNS: Final = {Verdict.SURVIVES: "✓", Verdict.THRASHES: "≈", Verdict.KILLED: "✗"}
_PLAIN: Final = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of a table; ``kind`` is its verdict, for colours, and ``tip`` says why."""

    text: str
    kind: str = _PLAIN
    sign: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with names in its first column; ``names`` columns are no figures."""

    heading: str
    caption: str
    heads: list[str]
    rows: list[list[Entry]]
    names: int
    notes: list[str]


def build(results: Sequence[Result]) -> list[Table]:
    """Return a table for each thing that was found, in the order of ``findings``."""
    found = []
    if passes.are_there(results):
        found.append(_passes(results))
    if findings.is_sweep(results):
        found += [_survival(matrix, results) for matrix in matrices(results)]
    if floors.are_there(results):
        found.append(_floors(results))
    return found


def _passes(results: Sequence[Result]) -> Table:
    names, rows = passes.table(results)
    entries = [[Entry(text) for text in row] for row in rows]
    heads = passes.headings(names, rows)
    return Table("Forward passes", "", heads, entries, len(names), [passes.NOTE])


def _survival(matrix: Matrix, results: Sequence[Result]) -> Table:
    heads = ["strategy", *(survival.heading(limit) for limit in matrix.limits)]
    rows = [[Entry(matrix.label(row)), *_fields(matrix, row)] for row in range(len(matrix.rows))]
    caption, notes = survival.caption(matrix, results), survival.notes(results)
    return Table("What works under which limit", caption, heads, rows, 1, notes)


def _fields(matrix: Matrix, row: int) -> Iterator[Entry]:
    for column, limit in enumerate(matrix.limits):
        field = matrix.field(row, column)
        if field is None:
            yield Entry("not measured")
            continue
        name = f"{matrix.label(row)}, {survival.heading(limit)}"
        yield _entry(field, name)


def _entry(field: Field, name: str) -> Entry:
    said, outcome = field.judgement, field.result.outcome
    if said:
        tip = f"{name}: {said.verdict}\n{said.reason}"
        return Entry(field.words, said.verdict.value, _SIGNS[said.verdict], tip)
    if outcome is Outcome.OK:
        return Entry(field.words, Verdict.SURVIVES.value, "✓", f"{name}: ok")
    tip = f"{name}: {outcome}\n{field.result.message}".rstrip()
    return Entry(field.words, "skipped" if outcome is Outcome.SKIPPED else "failed", "✗", tip)


def _floors(results: Sequence[Result]) -> Table:
    found = all_floors(results)
    heads = [f"{heading} {unit}".strip() for heading, unit in floors.HEADINGS]
    rows = [[_floor_entry(text) for text in floors.row(floor, found)] for floor in found]
    notes = [*floors.notes(found), *floors.reasons(found)]
    return Table("RAM floors", floors.caption(results), heads, rows, floors.NAMES, notes)


def _floor_entry(text: str) -> Entry:
    last = text.rpartition(" ")[2]
    kind = last if last in {verdict.value for verdict in Verdict} else _PLAIN
    return Entry(text, kind, _SIGNS[Verdict(kind)] if kind else "")
