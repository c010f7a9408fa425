"""What follows from a run's results: rows of figures, verdicts, RAM floors, and what the rows share.

A row is a dict with the settings in ``DIMENSIONS`` and the figures in ``metrics.COLUMNS``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.records.floor import Floor, floors
from weighin.records.metrics import COLUMNS, grouped, latest, middle, outcome_of
from weighin.records.run_folder import Records
from weighin.records.series import Matrix, RankSeries, matrices, option_words, over_ranks
from weighin.records.verdict import Judgement, judge_all
from weighin.result import NOT_DROPPED, Outcome, Result
from weighin.units import format_latency, format_rate

Row = dict[str, Any]

# Measurements with the same strategy and the same values of these properties are repeats (one series).
DIMENSIONS: Final[dict[str, Callable[[Result], Any]]] = {
    "operation": lambda one: one.cell.operation,
    "model": lambda one: one.cell.model.title,
    "device": lambda one: one.cell.device,
    "ram_limit_bytes": lambda one: one.cell.ram_limit_bytes,
    "vram_limit_bytes": lambda one: one.cell.vram_limit_bytes,
    "disk": lambda one: (rate := one.cell.disk_bytes_per_s) and format_rate(rate),
    "disk_latency": lambda one: (time_ns := one.cell.disk_latency_ns) and format_latency(time_ns),
    "ranks": lambda one: str(one.cell.ranks) if one.cell.ranks > 1 else None,
    "use": lambda one: one.cell.after_load if one.cell.operation == "load" else None,
    "format": lambda one: one.cell.format,
    "dtype": lambda one: one.cell.dtype,
    "cache": lambda one: one.cache,
    "isolation": lambda one: one.cell.isolation,
    "options": lambda one: ", ".join(option_words(one.cell)),
}
IN_LABELS: Final = ("format", "options")
"""These settings are a part of a row's label, where the rows of a strategy differ in them."""
_TEXTS: Final = (
    "group", "strategy", *DIMENSIONS, "outcome", "last_phase", "message", "needed_is_sampled",
)  # fmt: skip
OF_CELLS: Final = (*_TEXTS, "repeat", *COLUMNS)
OF_SERIES: Final = (
    *_TEXTS, "repeats", "ok", *(f"{name}{end}" for name in COLUMNS for end in ("", "_min", "_max")),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A run's results, the last record of each cell, with what follows from them, each computed once.
    ``missing`` is the number of planned cells without a record, and None for a run without a plan.
    """

    results: Sequence[Result]
    warnings: Sequence[str] = ()
    missing: int | None = None
    folder: Path = Path()

    @classmethod
    def of(cls, folder: Path, records: Records) -> "Measured":
        return cls(latest(records.results), records.warnings, records.missing, folder)

    @cached_property
    def by_series(self) -> dict[str, list[Result]]:
        return grouped(self.results, lambda one: one.cell.series)

    @cached_property
    def rows(self) -> list[Row]:
        """A row for each series, with the median and range of every figure: of its ok repeats, if any."""
        return [_summary(group) for group in self.by_series.values()]

    @cached_property
    def judgements(self) -> Mapping[str, Judgement | None]:
        return judge_all(self.results)

    @cached_property
    def floors(self) -> list[Floor]:
        return floors(self.results)

    @property
    def has_floors(self) -> bool:
        return any(floor.bytes is not None for floor in self.floors)

    @cached_property
    def matrices(self) -> list[Matrix]:
        return matrices(self.results, self.judgements)

    @cached_property
    def ranks(self) -> list[RankSeries]:
        return over_ranks(self.results)

    def rows_of(self, results: Iterable[Result]) -> list[Row]:
        ours = {result.cell.series for result in results}
        return [row for row in self.rows if row["group"] in ours]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the different values of a column, in the order of the rows; None counts as a value."""
    return list(dict.fromkeys(row[name] for row in rows))


def has(rows: Iterable[Row], name: str) -> bool:
    return any(row[name] is not None for row in rows)


def split(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows by their values in the columns ``names``, and keep the order of the rows."""
    return grouped(rows, lambda row: tuple(row[name] for name in names))


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the names of the settings, such as "model", in which the rows differ; without "format" if
    each strategy was measured with only one checkpoint format.
    """
    one_format = all(
        len(values(group, "format")) == 1 for group in split(rows, ["strategy"]).values()
    )
    differing = (name for name in DIMENSIONS if len(values(rows, name)) > 1)
    return [name for name in differing if not (name == "format" and one_format)]


def is_below_import(rows: Iterable[Row]) -> bool:
    """Return whether every loaded model is smaller than the memory of ``import torch``, so that the memory
    above the import does not show how many copies a load made.
    """
    loads = [row for row in rows if row["operation"] == "load"]
    sizes = [(row["model_bytes"] or 0, row["baseline_rss_bytes"]) for row in loads]
    below = [size < before for size, before in sizes if before is not None]
    return bool(below) and all(below)


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    return [row["cell"] for row in rows]


def row_of(result: Result) -> Row:
    """Return the row of one repeat."""
    return {
        "group": result.cell.series,
        "cell": result.cell,
        "strategy": result.cell.strategy,
        **{name: read(result) for name, read in DIMENSIONS.items()},
        "outcome": result.outcome.value,
        "last_phase": result.last_phase,
        "message": result.message,
        "needed_is_sampled": result.ran is not None and result.ran.needed_is_sampled,
        "repeat": result.cell.repeat,
        **{key: column.in_row(result) for key, column in COLUMNS.items()},
    }


def _summary(group: Sequence[Result]) -> Row:
    rows = [row_of(result) for result in group]
    good = [row for row in rows if row["outcome"] == Outcome.OK]
    ended = next((row for row in rows if row["outcome"] != Outcome.OK), rows[0])
    row = next((row for row in rows if row["cache"] == NOT_DROPPED), rows[0]).copy()
    row |= {name: ended[name] for name in ("last_phase", "message")}
    row |= {
        "outcome": outcome_of(each.outcome for each in group),
        "repeats": len(rows),
        "ok": len(good),
    }
    for name in COLUMNS:
        known = [value for each in good or rows if (value := each[name]) is not None]
        low, high = min(known, default=None), max(known, default=None)
        row |= {name: middle(known), f"{name}_min": low, f"{name}_max": high}
    return row
