"""Tabulate survival: which strategy survives, thrashes or is killed under which RAM limit."""

from collections.abc import Iterator, Sequence
from typing import Final

from weighin.records.series import Matrix, matrices
from weighin.records.verdict import Verdict
from weighin.report import captions, operations
from weighin.report.findings import Entry, Found
from weighin.report.operations import Kind
from weighin.report.rows import series
from weighin.result import Outcome, Result

SIGNS: Final = {Verdict.SURVIVES: "✓", Verdict.THRASHES: "≈", Verdict.KILLED: "✗"}
_MOST_LIMITS: Final = 7
"""The largest number of RAM limits that fit, as table columns, a terminal of 80 characters."""
MARKS: Final = {Verdict.SURVIVES: "🟢 ", Verdict.THRASHES: "🟡 ", Verdict.KILLED: "🔴 "}


def found(results: Sequence[Result]) -> list[Found]:
    """Return a table of strategies by RAM limits for each model measured under two or more limits."""
    return [
        Found(
            "Survival under each limit",
            *_table(matrix),
            1,
            caption(matrix, results),
            notes(results),
            [reason for verdict, reason in _reasons(matrix) if verdict is Verdict.THRASHES],
            [reason for verdict, reason in _reasons(matrix) if verdict is not Verdict.THRASHES],
        )
        for matrix in matrices(results)
    ]


def _table(matrix: Matrix) -> tuple[list[str], list[list[Entry]]]:
    """Return headings and rows; limits are columns, or rows if a terminal is too narrow for them."""
    limits, labels = [*map(heading, matrix.limits)], [*map(matrix.label, range(len(matrix.rows)))]
    fields = [[_entry(matrix, row, n) for n in range(len(limits))] for row in range(len(labels))]
    if len(limits) > max(_MOST_LIMITS, len(labels)):
        columns = zip(limits, zip(*fields, strict=True), strict=True)
        return ["RAM limit", *labels], [[Entry(limit), *column] for limit, column in columns]
    rows = zip(labels, fields, strict=True)
    return [kind_of(matrix).words["what"], *limits], [[Entry(label), *row] for label, row in rows]


def _reasons(matrix: Matrix) -> Iterator[tuple[Verdict, str]]:
    """Yield each verdict, with a line that explains the verdict by measured figures."""
    for (row, column), field in sorted(matrix.fields.items()):
        if judgement := field.judgement:
            under = f"{matrix.label(row)} under {captions.size(matrix.limits[column])}"
            yield judgement.verdict, f"{under} {judgement.verdict}: {judgement.reason}"


def heading(limit: int | None) -> str:
    return "no limit" if limit is None else captions.size(limit)


def notes(results: Sequence[Result]) -> list[str]:
    """Return sentences that explain the fields of the table of survival."""
    passes = max((result.cell.passes for result in results), default=0)
    used = {0: "", 1: " and for one forward pass"}.get(passes, f" and for {passes} forward passes")
    if any(result.cell.use for result in results):
        used = " and for the use of the model"
    kinds = operations.of(series(results))
    return [
        f"{kinds[0].life}{used}. killed: by the kernel, for lack of memory.",
        f"thrashes: the cell's memory reached the limit, and it either {kinds[0].lost}.",
    ]


def caption(matrix: Matrix, results: Sequence[Result]) -> str:
    """Return the settings that all measurements of a matrix share, except limit, format and options."""
    cells = [field.result for field in matrix.fields.values()]
    return captions.shared(series(cells), results, without=("ram_limit_bytes", "format", "options"))


def kind_of(matrix: Matrix) -> Kind:
    """Return the words for a matrix, according to whether it is of loads, saves or commands."""
    return operations.KINDS[matrix.scene.operation]


def _entry(matrix: Matrix, row: int, column: int) -> Entry:
    field = matrix.fields.get((row, column))
    name = f"{matrix.label(row)}, {heading(matrix.limits[column])}"
    if field is None:
        return Entry("-", tip=f"{name}: not measured")
    judgement, outcome = field.judgement, field.result.outcome
    if judgement:
        verdict = judgement.verdict
        tip = f"{name}: {verdict}\n{judgement.reason}"
        return Entry(field.words, verdict.value, SIGNS[verdict], MARKS[verdict], tip)
    if outcome is Outcome.OK:
        return Entry(field.words, Verdict.SURVIVES.value, "✓", tip=f"{name}: ok")
    tip = f"{name}: {outcome}\n{field.result.message}".rstrip()
    kind = "skipped" if outcome is Outcome.SKIPPED else "failed"
    return Entry(field.words, kind, "✗", tip=tip)
