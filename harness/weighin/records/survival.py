"""Build the survival matrix of a run: the verdicts on all strategies under several RAM limits.

The matrix is computed from results alone, for tables and plots. A row is a strategy with its format
and options. A column is a RAM limit. A field is one measurement under this limit, with the verdict
on the measurement (``weighin.records.verdict``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weighin.cell import Cell
from weighin.records.repeats import grouped, middle
from weighin.records.series import label_among
from weighin.records.verdict import Judgement, Verdict, judge_all, used_ns
from weighin.result import Outcome, Result
from weighin.units import format_seconds

_LEAST_LIMITS: Final = 2
_SEVERITY: Final = {Verdict.SURVIVES: 0, Verdict.THRASHES: 1, Verdict.KILLED: 3}
_FAILED: Final = 2


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the survival matrix: the measurement that stands for all repeats, and its verdict.

    This measurement has the median time among the repeats with the worst verdict. ``alike`` is the
    number of repeats with that verdict. ``spent_ns`` is the measurement's time until the model was
    ready, plus the time of the model's use.
    """

    result: Result
    judgement: Judgement | None
    spent_ns: int | None
    alike: int
    repeats: int

    @property
    def words(self) -> str:
        """The field's text: "killed", or the time or outcome, then "thrashes" for this verdict."""
        outcome, verdict = self.result.outcome, self.judgement and self.judgement.verdict
        if verdict is Verdict.KILLED:
            text = "killed"
        elif outcome is Outcome.OK and self.spent_ns is not None:
            text = format_seconds(self.spent_ns)
            text += " thrashes" if verdict is Verdict.THRASHES else ""
        else:
            text = f"{outcome} thrashes" if verdict is Verdict.THRASHES else str(outcome)
        return text if self.alike == self.repeats else f"{text} ({self.alike} of {self.repeats})"


@dataclass(frozen=True, slots=True)
class Matrix:
    """The survival matrix of comparable cells; ``fields`` maps (row, column) numbers to fields.

    ``limits``, the columns, are in descending order, with None (no limit) first.
    """

    scene: Cell
    rows: tuple[Cell, ...]
    limits: tuple[int | None, ...]
    fields: dict[tuple[int, int], Field]

    def field(self, row: int, column: int) -> Field | None:
        return self.fields.get((row, column))

    @property
    def model_bytes(self) -> int | None:
        sizes = [field.result.model_bytes for field in self.fields.values()]
        return next((size for size in sizes if size), None)

    def label(self, row: int) -> str:
        """Return a row's name: the strategy, and the format and options if the rows differ in them."""
        return label_among(self.rows[row], self.rows)


def matrices(results: Iterable[Result]) -> list[Matrix]:
    """Return a matrix for each group of cells that has at least two RAM limits.

    Cells of a group differ only in strategy, format, options, variables, command, limit and repeat.
    """
    cells = list(results)
    judgements = judge_all(cells)
    built = []
    for ours in grouped(cells, lambda one: _scene(one.cell).series).values():
        limits = {result.cell.ram_limit_bytes for result in ours}
        if len(limits - {None}) >= _LEAST_LIMITS:
            built.append(_matrix(_scene(ours[0].cell), ours, limits, judgements))
    return built


def _matrix(
    scene: Cell,
    ours: Sequence[Result],
    limits: set[int | None],
    judgements: dict[str, Judgement | None],
) -> Matrix:
    ordered = sorted(limits, key=lambda limit: float("inf") if limit is None else limit)[::-1]
    groups = grouped(ours, lambda one: _row(one.cell).series).values()
    rows = [_row(group[0].cell) for group in groups]
    fields = {}
    for number, group in enumerate(groups):
        for column, limit in enumerate(ordered):
            repeats = [result for result in group if result.cell.ram_limit_bytes == limit]
            if repeats:
                fields[number, column] = _field(repeats, judgements)
    return Matrix(scene, tuple(rows), tuple(ordered), fields)


def _field(repeats: Sequence[Result], judgements: dict[str, Judgement | None]) -> Field:
    def severity(result: Result) -> int:
        judgement = judgements[result.cell.id]
        if judgement is None:
            return 0 if result.outcome is Outcome.OK else _FAILED
        return _SEVERITY[judgement.verdict]

    worst = max(severity(result) for result in repeats)
    alike = [result for result in repeats if severity(result) == worst]
    typical_ns = middle(map(used_ns, alike))
    chosen = next((result for result in alike if used_ns(result) == typical_ns), alike[0])
    return Field(chosen, judgements[chosen.cell.id], used_ns(chosen), len(alike), len(repeats))


def _scene(cell: Cell) -> Cell:
    return replace(_row(cell), strategy="", format="", options={}, environment={}, command=())


def _row(cell: Cell) -> Cell:
    return replace(cell, ram_limit_bytes=None, repeat=0)
