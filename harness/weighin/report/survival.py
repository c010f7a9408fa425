"""The survival matrix as a table: for the terminal, and as markdown."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.record import Outcome, Result
from weighin.records.survival import Field, Matrix, matrices
from weighin.records.verdict import REFAULTS_PER_MODEL, SLOWDOWN, STALLED_SHARE, Verdict
from weighin.report import captions
from weighin.report.blocks import Drawable, Found, ListEntry
from weighin.report.dataframe import series
from weighin.report.markdown import table_lines
from weighin.text import markdown as escaped

STYLES: Final = {Verdict.SURVIVES: "green", Verdict.THRASHES: "yellow", Verdict.KILLED: "red"}
SIGNS: Final = {Verdict.SURVIVES: "✓", Verdict.THRASHES: "≈", Verdict.KILLED: "✗"}
MARKS: Final = {Verdict.SURVIVES: "🟢 ", Verdict.THRASHES: "🟡 ", Verdict.KILLED: "🔴 "}

RULE: Final = (
    "thrashes: its memory met the limit, and either it waited for memory"
    f" {STALLED_SHARE:.0%} of the time or more, or it read at least {REFAULTS_PER_MODEL:.0%} of the"
    f" model again and took {SLOWDOWN:g}x the time without a limit."
)


def terminal_survival(results: Sequence[Result]) -> RenderableType:
    """Return the matrices for a terminal, with the figures behind each verdict but survival."""
    parts: list[RenderableType] = []
    for matrix in matrices(results):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
        table.add_column("strategy", overflow="fold")
        for limit in matrix.limits:
            table.add_column(heading(limit), justify="right", overflow="fold")
        for row, fields in enumerate(_rows(matrix)):
            table.add_row(matrix.label(row), *(_styled(field) for field in fields))
        parts += [table, *(Text(line) for line in reasons(matrix, Verdict.THRASHES))]
        parts.append(Text(caption(matrix, results), style="dim"))
    return Group(*parts, *(Text(line, style="dim") for line in notes(results)))


def markdown_survival(results: Sequence[Result]) -> str:
    """Return the matrices as markdown tables, each with its caption below."""
    lines: list[str] = []
    for matrix in matrices(results):
        heads = ["strategy", *(heading(limit) for limit in matrix.limits)]
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
    """Return the matrices as blocks of the page; what is behind a verdict is shown on its field."""
    return [
        Found(
            "What works under which limit",
            caption(matrix, results),
            ["strategy", *map(heading, matrix.limits)],
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
    """Return the figures behind each verdict, or behind those of one kind, one line each."""
    lines = []
    for row, fields in enumerate(_rows(matrix)):
        for limit, field in zip(matrix.limits, fields, strict=True):
            said = field.judgement if field else None
            if said and only in (None, said.verdict):
                lines.append(
                    f"{matrix.label(row)} under {captions.size(limit)} {said.verdict}: {said.reason}"
                )
    return lines


def heading(limit: int | None) -> str:
    return "no limit" if limit is None else captions.size(limit)


def notes(results: Sequence[Result]) -> list[str]:
    """Return what a field is."""
    passes = max((one.cell.passes for one in results), default=0)
    used = {0: "", 1: ", and of one forward pass"}.get(passes, f", and of {passes} forward passes")
    return [
        f"Time: of the load until every byte was read{used}. killed: by the kernel, for lack of memory.",
        RULE,
    ]


def caption(matrix: Matrix, results: Sequence[Result]) -> str:
    """Return what all cells of a matrix have in common, but for the limit."""
    ours = [field.result for field in matrix.fields.values()]
    return captions.shared(series(ours), results, without=("ram_limit_bytes", "format", "options"))


def _rows(matrix: Matrix) -> Iterator[list[Field | None]]:
    for row in range(len(matrix.rows)):
        yield [matrix.field(row, column) for column in range(len(matrix.limits))]


def _names(matrix: Matrix, row: int) -> list[str]:
    return [f"{matrix.label(row)}, {heading(limit)}" for limit in matrix.limits]


def _entry(name: str, field: Field | None) -> ListEntry:
    if field is None:
        return ListEntry("not measured")
    said, outcome = field.judgement, field.result.outcome
    if said:
        tip = f"{name}: {said.verdict}\n{said.reason}"
        return ListEntry(field.words, said.verdict.value, SIGNS[said.verdict], tip)
    if outcome is Outcome.OK:
        return ListEntry(field.words, Verdict.SURVIVES.value, "✓", f"{name}: ok")
    tip = f"{name}: {outcome}\n{field.result.message}".rstrip()
    return ListEntry(field.words, "skipped" if outcome is Outcome.SKIPPED else "failed", "✗", tip)


def _styled(field: Field | None) -> Text:
    if field is None:
        return Text("-", style="dim")
    said = field.judgement
    return Text(field.words, style=STYLES[said.verdict] if said else "dim")


def _marked(field: Field | None) -> str:
    if field is None:
        return "-"
    return (MARKS[field.judgement.verdict] if field.judgement else "") + field.words
