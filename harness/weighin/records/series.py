"""Summarise the repeats of a measurement by outcome, metrics and phases, for ``weighin check``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final

from weighin.cell import Cell
from weighin.records.floor import floors as find_floors
from weighin.records.floor import searched, stopped_by
from weighin.records.metrics import METRICS, PHASE_FIGURES, phases_of_load
from weighin.records.repeats import latest, middle, outcome_of
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
    def of(cls, values: Sequence[int | None]) -> "Figure | None":
        known = [value for value in values if value is not None]
        median = middle(known)
        return None if median is None else cls(min(known), median, max(known))


@dataclass(frozen=True, slots=True)
class Series:
    """The summary of all repeats of one cell; ``figures`` (by metric) and ``phases`` are of ok repeats.

    ``outcome`` is a text of ``outcome_of``, such as "ok" or "ok 2, timeout 1". ``phases[name][key]``
    is the median of the number that ``PHASE_FIGURES[key]`` reads from the phase ``name``. ``no_floor``
    is the reason why a search found no RAM floor.
    """

    outcome: str
    repeats: int
    model_bytes: int | None = None
    limit_bytes: int | None = None
    figures: dict[str, Figure] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    message: str = ""
    no_floor: str = ""

    @property
    def is_ok(self) -> bool:
        return self.outcome == Outcome.OK

    @property
    def failures(self) -> frozenset[str]:
        """The outcomes of the repeats, without "ok"."""
        ends = (part.partition(" ")[0] for part in self.outcome.split(", "))
        return frozenset(end for end in ends if end != Outcome.OK)


def selects(selector: str, name: str) -> bool:
    """Return whether ``selector`` is a series' name, or each of its words, which may have shell wildcards,
    matches a word of the name.
    """
    words = name.split(" ")
    return selector == name or all(
        any(word == pattern or fnmatchcase(word, pattern) for word in words)
        for pattern in selector.split()
    )


def name_of(cell: Cell) -> str:
    """Return the name that all repeats of a cell share: words for its fields, in a fixed order."""
    limit = cell.ram_limit_bytes
    is_command = cell.operation == "command"
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
        *further_words(cell),
    ]
    return " ".join(one_line(word).replace(" ", "_") for word in words)  # a space separates words


def further_words(cell: Cell) -> list[str]:
    """Return the words for fields that most cells leave at the default, such as use and ranks."""
    return [
        *([f"use={cell.use}"] if cell.use else []),
        *([f"ranks={cell.ranks}"] if cell.ranks != 1 else []),
        *cell.disk,
        *(f"{key}={value}" for key, value in sorted(cell.options.items())),
        *cell.settings,
    ]


def label_among(cell: Cell, cells: Iterable[Cell]) -> str:
    """Return the strategy's name, followed by those of the cell's format, options and variables that
    differ among the strategy's cells in ``cells``.
    """
    same = [other for other in cells if other.strategy == cell.strategy]
    words = [cell.strategy]
    if any(other.format != cell.format for other in same):
        words.append(cell.format)
    if any(other.options != cell.options for other in same):
        words += [one_line(f"{key}={value}") for key, value in cell.options.items()]
    if any(other.environment != cell.environment for other in same):
        words += cell.settings
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class SeriesRun:
    """The results of one run; ``is_search`` is true if a floor search chose the limits of the cells."""

    results: Sequence[Result]
    is_search: bool = False


def summarise(runs: Iterable[SeriesRun]) -> dict[str, Series]:
    """Return the ``Series`` of all runs together, by name; of two records of a cell, the last counts.

    A floor search yields one series for each case that it searched, with the floor, if found, among its
    ``figures``. Its repeats are the cells without a limit, and the cell that stopped the search early.
    """
    groups: dict[str, list[Result]] = {}
    floors: dict[str, list[int]] = {}
    without: dict[str, str] = {}
    for run in runs:
        for result in latest(run.results):
            if not run.is_search:
                groups.setdefault(name_of(result.cell), []).append(result)
            elif result.cell.ram_limit_bytes is None or stopped_by([result]):
                groups.setdefault(name_of(searched(result.cell)), []).append(result)
        for floor in find_floors(run.results) if run.is_search else ():
            if floor.bytes is not None:
                floors.setdefault(name_of(floor.cell), []).append(floor.bytes)
            else:
                without[name_of(floor.cell)] = floor.message
    series = {name: _series(group) for name, group in groups.items()}
    for name, sizes in floors.items():
        if figure := Figure.of(sizes):
            figures = series[name].figures | {"floor": figure}
            series[name] = replace(series[name], figures=figures)
    for name, why in without.items():
        series[name] = replace(series[name], no_floor=why)
    return series


def _series(group: Sequence[Result]) -> Series:
    good = [result for result in group if result.outcome is Outcome.OK]
    bad = [result for result in group if result.outcome is not Outcome.OK]
    figures = {
        metric.name: figure
        for metric in METRICS.values()
        if (figure := Figure.of([metric.of(result) for result in good]))
    }
    values: dict[str, dict[str, list[int]]] = {}
    for result in good:
        for name, phase in phases_of_load(result):
            of_phase = values.setdefault(name, {})
            for key, read in PHASE_FIGURES.items():
                if (value := read(phase)) is not None:
                    of_phase.setdefault(key, []).append(value)
    return Series(
        outcome=outcome_of(result.outcome for result in group),
        repeats=len(group),
        model_bytes=next((each.model_bytes for each in group if each.model_bytes), None),
        limit_bytes=group[0].cell.ram_limit_bytes,
        figures=figures,
        phases={
            name: {key: known for key, each in keys.items() if (known := middle(each)) is not None}
            for name, keys in values.items()
        },
        message=bad[0].message if bad else "",
    )
