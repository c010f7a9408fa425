"""Convert records to rows of tables: a row per measurement (cell), or a row per group of repeats (series).

A row is a dict with the settings in ``DIMENSIONS`` and the figures in ``figures.COLUMNS``.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from weighin.cell import Cell
from weighin.records.metrics import grouped, latest, middle, outcome_of
from weighin.report.figures import COLUMNS
from weighin.result import NOT_DROPPED, Outcome, Result
from weighin.text import one_line
from weighin.units import format_exact, format_latency, format_rate

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
    "options": lambda one: ", ".join(_options(one.cell)),
}
FIGURES: Final = tuple(COLUMNS)
LIMITS: Final = ("ram_limit_bytes", "vram_limit_bytes")
_TEXTS: Final = (
    "group", "strategy", *DIMENSIONS, "outcome", "last_phase", "message", "needed_is_sampled",
)  # fmt: skip
OF_CELLS: Final = (*_TEXTS, "repeat", *FIGURES)
OF_SERIES: Final = (
    *_TEXTS, "repeats", "ok", *(f"{name}{end}" for name in FIGURES for end in ("", "_min", "_max")),
)  # fmt: skip


def cells(results: Iterable[Result]) -> list[Row]:
    """Return one row per measurement (cell), in the order of the first records.

    If a cell was measured again, the row has the figures of the last record. ``above_import_bytes`` is
    the exact peak of the resident set size, minus the resident set size after ``import torch``. For
    a save, the resident set size with the model in memory is subtracted instead.
    """
    return [_row(result) for result in latest(results)]


def series(results: Iterable[Result]) -> list[Row]:
    """Return one row for the repeats of each measurement, with the median and range of every figure.

    The columns ``x_min`` and ``x_max`` have the range of a figure ``x``. If some repeats ended ok, only
    these repeats count for the figures. ``outcome`` counts all repeats: "ok 2, timeout 1".
    """
    return [
        _summary(group) for group in grouped(latest(results), lambda one: one.cell.series).values()
    ]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the different values of a column, in the order of the rows; None counts as a value."""
    return list(dict.fromkeys(row[name] for row in rows))


def has(rows: Iterable[Row], name: str) -> bool:
    """Return whether a column has a value other than None in at least one row."""
    return any(row[name] is not None for row in rows)


def split(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows by their values in the columns ``names``, and keep the order of the rows."""
    return grouped(rows, lambda row: tuple(row[name] for name in names))


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the names of the settings, such as "model", in which the rows differ.

    "format" is left out if each strategy was measured with only one checkpoint format.
    """
    of_strategies = split(rows, ["strategy"]).values()
    return [
        name
        for name in DIMENSIONS
        if len(values(rows, name)) > 1
        and (name != "format" or any(len(values(group, name)) > 1 for group in of_strategies))
    ]


def is_below_import(rows: Iterable[Row]) -> bool:
    """Return whether every loaded model is smaller than the memory of ``import torch``.

    For such a small model, the memory above the import does not show how many copies a load made.
    """
    sizes = [
        (row["model_bytes"], row["baseline_rss_bytes"])
        for row in rows
        if row["operation"] == "load" and row["baseline_rss_bytes"] is not None
    ]
    return bool(sizes) and all(model is None or model < imported for model, imported in sizes)


def _row(result: Result) -> Row:
    return {
        "group": result.cell.series,
        "strategy": result.cell.strategy,
        **{name: read(result) for name, read in DIMENSIONS.items()},
        "outcome": result.outcome.value,
        "last_phase": result.last_phase,
        "message": result.message,
        "needed_is_sampled": result.ran is not None and result.ran.needed_is_sampled,
        "repeat": result.cell.repeat,
        **{key: column.read(result) for key, column in COLUMNS.items()},
    }


def _summary(group: Sequence[Result]) -> Row:
    rows = [_row(result) for result in group]
    good = [row for row in rows if row["outcome"] == Outcome.OK]
    bad = [row for row in rows if row["outcome"] != Outcome.OK]
    ended = (bad or rows)[0]
    first = next((row for row in rows if row["cache"] == NOT_DROPPED), rows[0])
    row = first | {name: ended[name] for name in ("last_phase", "message")}
    row |= {"outcome": outcome_of(each.outcome for each in group), "repeats": len(rows)}
    row |= {"ok": len(good)}
    for name in FIGURES:
        known = [value for each in good or rows if (value := each[name]) is not None]
        row |= {
            name: middle(known),
            f"{name}_min": min(known, default=None),
            f"{name}_max": max(known, default=None),
        }
    return row


def _options(cell: Cell) -> Iterator[str]:
    """Yield a text for the soft RAM limit, each strategy option and each environment variable of a cell."""
    if cell.ram_high_bytes is not None:
        yield f"ram_high={format_exact(cell.ram_high_bytes)}"
    yield from (one_line(f"{key}={_short(value)}") for key, value in sorted(cell.options.items()))
    yield from cell.settings


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
