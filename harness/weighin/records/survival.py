"""Build the survival matrix of a run: the verdicts on all strategies under several RAM limits.

The matrix is computed from results alone, for tables and plots. A row is a strategy with its format
and options. A column is a RAM limit. A field is one measurement under this limit, with the verdict
on the measurement (``weighin.records.verdict``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weighin.cell import Cell
from weighin.records.floor import searched
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
    """The measurement that stands for all repeats of a row under one limit, and its verdict.

    It has the median time (``used_ns``) among the ``alike`` repeats with the worst verdict.
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
    """Return a matrix for each group of cells that has at least two RAM limits, and that differ only in
    strategy, format, options, variables, command, limit and repeat.
    """
    cells = list(results)
    judgements = judge_all(cells)

    def scene(cell: Cell) -> Cell:
        row = searched(cell)
        return replace(row, strategy="", format="", options={}, environment={}, command=())

    built = []
    for ours in grouped(cells, lambda one: scene(one.cell).series).values():
        limits = {result.cell.ram_limit_bytes for result in ours}
        if len(limits - {None}) < _LEAST_LIMITS:
            continue
        ordered = sorted(limits, key=lambda limit: -(float("inf") if limit is None else limit))
        groups = grouped(ours, lambda one: searched(one.cell).series).values()
        fields = {}
        for row, group in enumerate(groups):
            by_limit = grouped(group, lambda one: one.cell.ram_limit_bytes)
            for column, limit in enumerate(ordered):
                if limit in by_limit:
                    fields[row, column] = _field(by_limit[limit], judgements)
        rows = tuple(searched(group[0].cell) for group in groups)
        built.append(Matrix(scene(ours[0].cell), rows, tuple(ordered), fields))
    return built


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
