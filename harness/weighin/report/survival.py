"""Render the survival matrix as a table for the terminal and as markdown."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.record import Outcome, Result
from weighin.records.survival import Field, Matrix, matrices
from weighin.records.verdict import Verdict
from weighin.report import captions, operations
from weighin.report.blocks import Drawable, Found, ListEntry
from weighin.report.dataframe import series
from weighin.report.markdown import table_lines
from weighin.report.operations import Kind
from weighin.text import markdown as escaped

STYLES: Final = {Verdict.SURVIVES: "green", Verdict.THRASHES: "yellow", Verdict.KILLED: "red"}
SIGNS: Final = {Verdict.SURVIVES: "✓", Verdict.THRASHES: "≈", Verdict.KILLED: "✗"}
MARKS: Final = {Verdict.SURVIVES: "🟢 ", Verdict.THRASHES: "🟡 ", Verdict.KILLED: "🔴 "}


def terminal_survival(results: Sequence[Result]) -> RenderableType:
    """Return the matrices for a terminal, with the figures behind each verdict "thrashes"."""
    parts: list[RenderableType] = []
    for matrix in matrices(results):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
        table.add_column(kind_of(matrix).words["what"], overflow="fold")
        for limit in matrix.limits:
            table.add_column(heading(limit), justify="right", overflow="fold")
        for row, fields in enumerate(_rows(matrix)):
            table.add_row(matrix.label(row), *(_styled(field) for field in fields))
        parts += [table, *(Text(line) for line in reasons(matrix, Verdict.THRASHES))]
        parts.append(Text(caption(matrix, results), style="dim"))
    return Group(*parts, *(Text(line, style="dim") for line in notes(results)))


def markdown_survival(results: Sequence[Result]) -> str:
    """Return the matrices as markdown tables, each with its caption below the table."""
    lines: list[str] = []
    for matrix in matrices(results):
        heads = [kind_of(matrix).words["what"], *(heading(limit) for limit in matrix.limits)]
        rows = [
            [matrix.label(row), *(_marked(field) for field in fields)]
            for row, fields in enumerate(_rows(matrix))
        ]
        lines += [*table_lines(heads, rows, names=1), "", escaped(caption(matrix, results)), ""]
    return "\n".join([*lines, *(escaped(line) for line in notes(results))])


def markdown_reasons(results: Sequence[Result]) -> str:
    """Return ``markdown_survival`` with the figures behind each verdict."""
    lines = [line for matrix in matrices(results) for line in reasons(matrix)]
    return "\n".join([markdown_survival(results), "", *(f"- {escaped(line)}" for line in lines)])


def html_survival(results: Sequence[Result]) -> list[Drawable]:
    """Return the matrices as blocks of report.html, with each verdict's figures shown on hover."""
    return [
        Found(
            "Survival under each limit",
            caption(matrix, results),
            [kind_of(matrix).words["what"], *map(heading, matrix.limits)],
            [
                [ListEntry(matrix.label(row)), *map(_entry, _names(matrix, row), fields)]
                for row, fields in enumerate(_rows(matrix))
            ],
            1,
            notes(results),
        )
        for matrix in matrices(results)
    ]


def reasons(matrix: Matrix, only: Verdict | None = None) -> list[str]:
    """Return a line with the figures behind each verdict, or only behind each verdict ``only``."""
    lines = []
    for row, fields in enumerate(_rows(matrix)):
        for limit, field in zip(matrix.limits, fields, strict=True):
            judgement = field.judgement if field else None
            if judgement and only in (None, judgement.verdict):
                lines.append(
                    f"{matrix.label(row)} under {captions.size(limit)} {judgement.verdict}:"
                    f" {judgement.reason}"
                )
    return lines


def heading(limit: int | None) -> str:
    return "no limit" if limit is None else captions.size(limit)


def notes(results: Sequence[Result]) -> list[str]:
    """Return explanations of the fields of a survival matrix."""
    passes = max((result.cell.passes for result in results), default=0)
    used = {0: "", 1: " and for one forward pass"}.get(passes, f" and for {passes} forward passes")
    if any(result.cell.use for result in results):
        used = " and for the use of the model"
    kinds = operations.of(series(results))
    return [
        f"{kinds[0].life}{used}. killed: by the kernel, for lack of memory.",
        rule(kinds[0]),
    ]


def rule(kind: Kind) -> str:
    """Return when a cell thrashes."""
    return f"thrashes: the cell's memory reached the limit, and it either {kind.lost}."


def caption(matrix: Matrix, results: Sequence[Result]) -> str:
    """Return the properties that all cells of a matrix share, without the limit."""
    cells = [field.result for field in matrix.fields.values()]
    return captions.shared(series(cells), results, without=("ram_limit_bytes", "format", "options"))


def kind_of(matrix: Matrix) -> Kind:
    """Return the operation of a matrix's cells."""
    return operations.KINDS[matrix.scene.operation]


def _rows(matrix: Matrix) -> Iterator[list[Field | None]]:
    for row in range(len(matrix.rows)):
        yield [matrix.field(row, column) for column in range(len(matrix.limits))]


def _names(matrix: Matrix, row: int) -> list[str]:
    return [f"{matrix.label(row)}, {heading(limit)}" for limit in matrix.limits]


def _entry(name: str, field: Field | None) -> ListEntry:
    if field is None:
        return ListEntry("not measured")
    judgement, outcome = field.judgement, field.result.outcome
    if judgement:
        tip = f"{name}: {judgement.verdict}\n{judgement.reason}"
        return ListEntry(field.words, judgement.verdict.value, SIGNS[judgement.verdict], tip)
    if outcome is Outcome.OK:
        return ListEntry(field.words, Verdict.SURVIVES.value, "✓", f"{name}: ok")
    tip = f"{name}: {outcome}\n{field.result.message}".rstrip()
    return ListEntry(field.words, "skipped" if outcome is Outcome.SKIPPED else "failed", "✗", tip)


def _styled(field: Field | None) -> Text:
    if field is None:
        return Text("-", style="dim")
    judgement = field.judgement
    return Text(field.words, style=STYLES[judgement.verdict] if judgement else "dim")


def _marked(field: Field | None) -> str:
    if field is None:
        return "-"
    return (MARKS[field.judgement.verdict] if field.judgement else "") + field.words
