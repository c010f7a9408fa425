"""What follows from a run's results: rows and series (the repeats of a measurement), with their names, verdicts
and RAM floors, and comparisons by RAM limits and by ranks.

A row is a dict with the settings in ``DIMENSIONS`` and the figures in ``metrics.COLUMNS``.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.records import metrics
from weighin.records.floor import Floor, floors, searched, why_stopped
from weighin.records.metrics import COLUMNS, METRICS, grouped, latest, middle, outcome_of
from weighin.records.run_folder import Records
from weighin.records.verdict import Judgement, Typical, height, judge_all, typical
from weighin.result import NOT_DROPPED, Outcome, Result
from weighin.text import one_line
from weighin.units import format_exact, format_latency, format_rate

Row = dict[str, Any]

STRATEGY: Final = 1  # the position of a word in the name of a series (``name_of``)
FORMAT: Final = 2
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


@dataclass(frozen=True, slots=True)
class Figure:
    """The smallest, median and largest value of one metric among the repeats that ended ok."""

    low: int
    median: int
    high: int

    @classmethod
    def of(cls, values: Iterable[int | None]) -> "Figure | None":
        known = [value for value in values if value is not None]
        return cls(min(known), middle(known) or 0, max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Series:
    """The summary of all repeats of one cell; ``figures`` (by metric) and ``phases`` are of ok repeats."""

    outcome: str  # of ``outcome_of``: "ok" or "ok 2, timeout 1"
    repeats: int
    model_bytes: int | None = None
    limit_bytes: int | None = None
    figures: dict[str, Figure] = field(default_factory=dict)
    # By the phase's name, and the key in ``PHASE_FIGURES``: the median of this number.
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    message: str = ""
    no_floor: str = ""  # why a search found no RAM floor

    @property
    def is_ok(self) -> bool:
        return self.outcome == Outcome.OK

    @property
    def failures(self) -> frozenset[str]:
        ends = (part.partition(" ")[0] for part in self.outcome.split(", "))
        return frozenset(end for end in ends if end != Outcome.OK)


def selects(selector: str, name: str) -> bool:
    """Whether ``selector`` is the series' name, or each word of it (maybe with wildcards) matches a word there."""
    words = name.split(" ")
    return selector == name or all(
        any(word == pattern or fnmatchcase(word, pattern) for word in words)
        for pattern in selector.split()
    )


def name_of(cell: Cell) -> str:
    """Return the name that all repeats of a cell share: words for its fields, in a fixed order."""
    is_command, limit = cell.operation == "command", cell.ram_limit_bytes
    of_model = (cell.model.title, cell.strategy, cell.format, cell.dtype, cell.device)
    words = [
        *(("command", cell.strategy) if is_command else of_model),
        cell.cache,
        cell.isolation,
        f"ram={format_exact(limit)}" if limit else "ram=none",
        *(["operation=save"] if cell.operation == "save" else []),
        *([f"vram={format_exact(cell.vram_limit_bytes)}"] if cell.vram_limit_bytes else []),
        *([f"ram_high={format_exact(cell.ram_high_bytes)}"] if cell.ram_high_bytes else []),
        *([f"passes={cell.passes}"] if cell.passes != 1 and not (is_command or cell.use) else []),
        *([f"use={cell.use}"] if cell.use else []),
        *([f"ranks={cell.ranks}"] if cell.ranks != 1 else []),
        *cell.disk,
        *(f"{key}={value}" for key, value in sorted(cell.options.items())),
        *cell.settings,
    ]
    return " ".join(one_line(word).replace(" ", "_") for word in words)  # a space separates words


def option_words(cell: Cell) -> list[str]:
    """Return a text for each option and each environment variable of a cell."""
    return list(chain.from_iterable(_own_words(cell)[1:]))


def _own_words(cell: Cell) -> tuple[tuple[str, ...], ...]:
    options = (
        f"{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in sorted(cell.options.items())
    )
    return (cell.format,), tuple(map(one_line, options)), cell.settings


def labels_among(cells: Iterable[Cell]) -> Callable[[Cell], str]:
    """Return the function that puts a cell into words: its strategy, followed by its format, options
    and variables if the strategy's cells in ``cells`` differ in them.
    """
    differing = {
        strategy: [len({*same}) > 1 for same in zip(*map(_own_words, ours), strict=True)]
        for strategy, ours in grouped(cells, lambda cell: cell.strategy).items()
    }

    def label(cell: Cell) -> str:
        shown = compress(_own_words(cell), differing[cell.strategy])
        return " ".join([cell.strategy, *chain.from_iterable(shown)])

    return label


def summarise(runs: Iterable[Records]) -> dict[str, Series]:
    """Return the ``Series`` of all runs together, by name; of two records of a cell, the last counts.

    A search yields a series with its floor for each case. Its repeats are the cells without a limit, and
    the cell that stopped the search early.
    """
    groups: dict[str, list[Result]] = {}
    searches: dict[str, list[Floor]] = {}
    for run in runs:
        is_search = run.coverage is not None and run.coverage.is_search
        for result in latest(run.results):
            if not is_search:
                groups.setdefault(name_of(result.cell), []).append(result)
            elif result.cell.ram_limit_bytes is None or why_stopped(result):
                groups.setdefault(name_of(searched(result.cell)), []).append(result)
        for floor in floors(run.results) if is_search else ():
            searches.setdefault(name_of(floor.cell), []).append(floor)
    return {name: _series(group, searches.get(name, ())) for name, group in groups.items()}


def _series(group: Sequence[Result], of_search: Sequence[Floor]) -> Series:
    good = [result for result in group if result.outcome is Outcome.OK]
    values = {name: [metric.of(result) for result in good] for name, metric in METRICS.items()}
    values["floor"] = [floor.bytes for floor in of_search]
    named = (each for one in good for each in metrics.phases_of_load(one))
    phases = dict[str, dict[str, int]]()
    for name, found in grouped(named, lambda each: each[0]).items():
        reads = metrics.PHASE_FIGURES.items()
        medians = {k: middle(read(phase) for _, phase in found) for k, read in reads}
        phases[name] = {key: value for key, value in medians.items() if value is not None}
    return Series(
        outcome=outcome_of(result.outcome for result in group),
        repeats=len(group),
        model_bytes=next((each.model_bytes for each in group if each.model_bytes), None),
        limit_bytes=group[0].cell.ram_limit_bytes,
        figures={name: figure for name, each in values.items() if (figure := Figure.of(each))},
        phases=phases,
        message=next((each.message for each in group if each.outcome is not Outcome.OK), ""),
        no_floor=next((each.message for each in of_search[::-1] if each.bytes is None), ""),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """The survival of comparable cells: ``fields`` by row and column, the first of which is no limit."""

    scene: Cell
    labels: list[str]
    limits: tuple[int | None, ...]
    fields: dict[tuple[int, int], Typical]


@dataclass(frozen=True, slots=True)
class RankSeries:
    """The ok results of one strategy, by the number of ranks, with the medians of the cgroup's peaks above the
    imports (``charges``). ``cell`` has one rank.
    """

    cell: Cell
    by_ranks: dict[int, list[Result]]
    charges: dict[int, int]
    model_bytes: int | None

    @property
    def growth(self) -> str:
        """How much memory each further rank adds: "linear (1.02x a rank)"; "-" if it cannot be computed."""
        if len(self.charges) < 2 or not self.model_bytes:
            return "-"
        low, high = min(self.charges), max(self.charges)
        copies = (self.charges[high] - self.charges[low]) / (high - low) / self.model_bytes
        kind = "flat" if copies < 0.25 else "linear" if copies >= 0.75 else "between"
        return f"{kind} ({copies:.2f}x a rank)"


@dataclass(frozen=True)
class Measured:
    """A run's results, the last record of each cell, with what follows from them, each computed once."""

    results: Sequence[Result]
    warnings: Sequence[str] = ()
    missing: int | None = None  # the number of planned cells without a record; None without a plan
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
        """A matrix for each group of cells that has at least two RAM limits, and that differ only in
        strategy, format, options, variables, command, limit and repeat.
        """

        def scene(cell: Cell) -> Cell:
            row = searched(cell)
            return replace(row, strategy="", format="", options={}, environment={}, command=())

        built = []
        for ours in grouped(self.results, lambda one: scene(one.cell).series).values():
            limits = {result.cell.ram_limit_bytes for result in ours}
            if len(limits - {None}) < 2:
                continue
            ordered = sorted(limits, key=lambda limit: -height(limit))
            rows = grouped(ours, lambda one: searched(one.cell).series).values()
            fields = {
                (row, ordered.index(limit)): typical(repeats, self.judgements)
                for row, group in enumerate(rows)
                for limit, repeats in grouped(group, lambda one: one.cell.ram_limit_bytes).items()
            }
            cells = [searched(group[0].cell) for group in rows]
            labels = list(map(labels_among(cells), cells))
            built.append(Matrix(scene(ours[0].cell), labels, tuple(ordered), fields))
        return built

    @cached_property
    def ranks(self) -> list[RankSeries]:
        """A ``RankSeries`` for each strategy that was measured with two or more ranks, without a RAM
        limit: page cache fills memory up to a limit.
        """
        good = (one for one in self.results if one.outcome is Outcome.OK)
        loads = (r for r in good if r.cell.operation == "load" and not r.cell.ram_limit_bytes)
        series = []
        for group in grouped(loads, lambda one: replace(one.cell, ranks=1).series).values():
            ordered = sorted(group, key=lambda each: each.cell.ranks)
            by_ranks = grouped(ordered, lambda each: each.cell.ranks)
            if max(by_ranks) > 1:
                medians = {n: middle(map(metrics.charge, same)) for n, same in by_ranks.items()}
                charges = {n: size for n, size in medians.items() if size is not None}
                model = next((each.model_bytes for each in group if each.model_bytes), None)
                series.append(RankSeries(replace(group[0].cell, ranks=1), by_ranks, charges, model))
        return series

    def rows_of(self, results: Iterable[Result]) -> list[Row]:
        ours = {result.cell.series for result in results}
        return [row for row in self.rows if row["group"] in ours]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the different values of a column, in the order of the rows; None counts as a value."""
    return list(dict.fromkeys(row[name] for row in rows))


def split(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows by their values in the columns ``names``, and keep the order of the rows."""
    return grouped(rows, lambda row: tuple(row[name] for name in names))


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the names of the settings, such as "model", in which the rows differ; without "format" if
    each strategy was measured with only one checkpoint format.
    """
    by_strategy = split(rows, ["strategy"]).values()
    one_format = all(len(values(group, "format")) == 1 for group in by_strategy)
    differing = (name for name in DIMENSIONS if len(values(rows, name)) > 1)
    return [name for name in differing if not (name == "format" and one_format)]


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    return [row["cell"] for row in rows]


def row_of(result: Result) -> Row:
    figures = {key: column.read(result) for key, column in COLUMNS.items()}
    times = {key: one for key, one in figures.items() if COLUMNS[key].unit == "ns"}
    seconds = {key: None if one is None else one / 1e9 for key, one in times.items()}
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
        **figures,
        **seconds,
    }


def _summary(group: Sequence[Result]) -> Row:
    rows = [row_of(result) for result in group]
    good = [row for row in rows if row["outcome"] == Outcome.OK]
    ended = next((row for row in rows if row["outcome"] != Outcome.OK), rows[0])
    row = next((row for row in rows if row["cache"] == NOT_DROPPED), rows[0]).copy()
    row |= {name: ended[name] for name in ("last_phase", "message")}
    row["outcome"] = outcome_of(each.outcome for each in group)
    row |= {"repeats": len(rows), "ok": len(good)}
    for name in COLUMNS:
        known = [value for each in good or rows if (value := each[name]) is not None]
        low, high = min(known, default=None), max(known, default=None)
        row |= {name: middle(known), f"{name}_min": low, f"{name}_max": high}
    return row
