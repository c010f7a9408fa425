"""Name and summarise the repeats of a measurement (a series), and compare series: as a matrix of survival,
and over ranks (processes).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, compress
from math import inf
from typing import Final, Literal

from weighin.cell import Cell
from weighin.records.floor import Floor, floors, searched, why_stopped
from weighin.records.metrics import (
    METRICS,
    PHASE_FIGURES,
    charge,
    grouped,
    latest,
    middle,
    outcome_of,
    phases_of_load,
)
from weighin.records.run_folder import Records
from weighin.records.verdict import Judgement, Typical, typical
from weighin.result import Outcome, Result
from weighin.text import one_line
from weighin.units import format_exact

STRATEGY: Final = 1
FORMAT: Final = 2
"""``STRATEGY`` and ``FORMAT`` are positions of words in the name of a series (``name_of``)."""


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
    """Whether ``selector`` is a series' name, or each of its words, with shell wildcards, matches one of it."""
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
    """Return a text for the soft RAM limit, each option and each environment variable of a cell."""
    return [word for words in _own_words(cell)[1:] for word in words]


def _own_words(cell: Cell) -> tuple[tuple[str, ...], ...]:
    """Return the words for a cell's format, soft RAM limit, options and environment variables."""
    options = (
        f"{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in sorted(cell.options.items())
    )
    high = (f"ram_high={format_exact(cell.ram_high_bytes)}",) if cell.ram_high_bytes else ()
    return (cell.format,), high, tuple(map(one_line, options)), cell.settings


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
        for result in latest(run.results):
            if not (run.coverage and run.coverage.is_search):
                groups.setdefault(name_of(result.cell), []).append(result)
            elif result.cell.ram_limit_bytes is None or why_stopped(result):
                groups.setdefault(name_of(searched(result.cell)), []).append(result)
        for floor in floors(run.results) if run.coverage and run.coverage.is_search else ():
            searches.setdefault(name_of(floor.cell), []).append(floor)
    return {name: _series(group, searches.get(name, ())) for name, group in groups.items()}


def _series(group: Sequence[Result], of_search: Sequence[Floor]) -> Series:
    good = [result for result in group if result.outcome is Outcome.OK]
    values = {name: [metric.of(result) for result in good] for name, metric in METRICS.items()}
    values["floor"] = [floor.bytes for floor in of_search]
    named = (each for one in good for each in phases_of_load(one))
    medians = {
        name: {
            key: middle(read(phase) for _, phase in found) for key, read in PHASE_FIGURES.items()
        }
        for name, found in grouped(named, lambda each: each[0]).items()
    }
    return Series(
        outcome=outcome_of(result.outcome for result in group),
        repeats=len(group),
        model_bytes=next((each.model_bytes for each in group if each.model_bytes), None),
        limit_bytes=group[0].cell.ram_limit_bytes,
        figures={name: figure for name, each in values.items() if (figure := Figure.of(each))},
        phases={
            name: {key: value for key, value in each.items() if value is not None}
            for name, each in medians.items()
        },
        message=next((each.message for each in group if each.outcome is not Outcome.OK), ""),
        no_floor=next((each.message for each in of_search[::-1] if each.bytes is None), ""),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """The survival matrix of comparable cells: by (row, column), its fields; no limit is the first column."""

    scene: Cell
    rows: tuple[Cell, ...]
    limits: tuple[int | None, ...]
    fields: dict[tuple[int, int], Typical]

    @property
    def model_bytes(self) -> int | None:
        sizes = [field.result.model_bytes for field in self.fields.values()]
        return next((size for size in sizes if size), None)

    @property
    def labels(self) -> list[str]:
        """The name of each row: the strategy, and the format and options if the rows differ in them."""
        return list(map(labels_among(self.rows), self.rows))


def matrices(results: Sequence[Result], judgements: Mapping[str, Judgement | None]) -> list[Matrix]:
    """Return a matrix for each group of cells that has at least two RAM limits, and that differ only in
    strategy, format, options, variables, command, limit and repeat.
    """

    def scene(cell: Cell) -> Cell:
        row = searched(cell)
        return replace(row, strategy="", format="", options={}, environment={}, command=())

    built = []
    for ours in grouped(results, lambda one: scene(one.cell).series).values():
        limits = {result.cell.ram_limit_bytes for result in ours}
        ordered = sorted(limits, key=lambda limit: -(inf if limit is None else limit))
        rows = grouped(ours, lambda one: searched(one.cell).series).values()
        fields = {
            (row, ordered.index(limit)): typical(repeats, judgements)
            for row, group in enumerate(rows)
            for limit, repeats in grouped(group, lambda one: one.cell.ram_limit_bytes).items()
        }
        if len(limits - {None}) > 1:
            cells = tuple(searched(group[0].cell) for group in rows)
            built.append(Matrix(scene(ours[0].cell), cells, tuple(ordered), fields))
    return built


@dataclass(frozen=True, slots=True)
class RankSeries:
    """The ok results of one strategy, by the number of ranks, and the memory of all ranks above the imports:
    the RAM floor if a search found one, else the median of the cgroup's peaks. ``cell`` has one rank."""

    cell: Cell
    by_ranks: dict[int, list[Result]]
    charges: dict[int, int]
    model_bytes: int | None

    @property
    def copies_per_rank(self) -> float | None:
        """The memory that each further rank adds, in model sizes; None if it cannot be computed."""
        if len(self.charges) < 2 or not self.model_bytes:
            return None
        low, high = min(self.charges), max(self.charges)
        return (self.charges[high] - self.charges[low]) / (high - low) / self.model_bytes

    @property
    def growth(self) -> Literal["flat", "between", "linear"] | None:
        if (copies := self.copies_per_rank) is None:
            return None
        return "flat" if copies < 0.25 else "linear" if copies >= 0.75 else "between"


def over_ranks(results: Sequence[Result], searched_floors: Sequence[Floor]) -> list[RankSeries]:
    """Return a ``RankSeries`` for each strategy of a run that was measured with two or more ranks,
    without a RAM limit: page cache fills memory up to a limit.
    """
    floors_bytes = {
        floor.cell.series: floor.bytes - (floor.import_bytes or 0)
        for floor in searched_floors
        if floor.bytes is not None
    }
    loads = (
        one
        for one in latest(results)
        if one.outcome is Outcome.OK
        and one.cell.operation == "load"
        and not one.cell.ram_limit_bytes
    )
    series = []
    for group in grouped(loads, lambda one: replace(one.cell, ranks=1).series).values():
        ordered = sorted(group, key=lambda each: each.cell.ranks)
        by_ranks = grouped(ordered, lambda each: each.cell.ranks)
        if max(by_ranks) > 1:
            charges = {
                ranks: size
                for ranks, same in by_ranks.items()
                if (size := floors_bytes.get(same[0].cell.series, middle(map(charge, same))))
                is not None
            }
            model = next((each.model_bytes for each in group if each.model_bytes), None)
            series.append(RankSeries(replace(group[0].cell, ranks=1), by_ranks, charges, model))
    return series
