"""What a run measured, as a gate compares it: a series' outcome, its figures, and its phases'."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import median_low
from typing import Final

from weighin.cell import Cell
from weighin.record import Outcome, Result
from weighin.records.floor import floors as find_floors
from weighin.records.floor import searched, stopped_by
from weighin.records.metrics import METRICS, PHASE_FIGURES, phases_of_load
from weighin.text import one_line
from weighin.units import format_exact

STRATEGY: Final = 1
FORMAT: Final = 2
"""Where a series' name has these words."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric over the ok repeats of a series: bytes or nanoseconds."""

    low: int
    median: int
    high: int

    @classmethod
    def of(cls, values: Sequence[int]) -> "Figure":
        """Return the lowest, the middle and the highest of some values, of which there is one."""
        return cls(min(values), median_low(values), max(values))


@dataclass(frozen=True, slots=True)
class Series:
    """The repeats of one cell, taken together.

    ``outcome`` is that of all repeats, or counts them: "ok 2, timeout 1". Figures are those of the
    ok repeats; a series without one has none. ``phases`` holds medians, by phase and figure.
    ``no_floor`` says why a search for its floor found none.
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
        """Whether every repeat is."""
        return self.outcome == Outcome.OK

    @property
    def failures(self) -> frozenset[str]:
        """The outcomes of its repeats that are not ok."""
        ends = (part.partition(" ")[0] for part in self.outcome.split(", "))
        return frozenset(end for end in ends if end != Outcome.OK)


def selects(selector: str, name: str) -> bool:
    """Tell whether a series of this name is meant: each word of ``selector`` matches one of its words.

    Words may have shell wildcards; a whole name means itself.
    """
    words = name.split(" ")
    return selector == name or all(
        any(word == pattern or fnmatchcase(word, pattern) for word in words)
        for pattern in selector.split()
    )


def name_of(cell: Cell) -> str:
    """Return a series' name: all that tells it from another, in words, in one order."""
    limit = cell.ram_limit_bytes
    words = [
        cell.model.title,
        cell.strategy,
        cell.format,
        cell.dtype,
        cell.device,
        cell.cache,
        cell.isolation,
        f"ram={format_exact(limit)}" if limit else "ram=none",
        *(["operation=save"] if cell.operation == "save" else []),
        *([f"vram={format_exact(cell.vram_limit_bytes)}"] if cell.vram_limit_bytes else []),
        *([f"ram_high={format_exact(cell.ram_high_bytes)}"] if cell.ram_high_bytes else []),
        *([f"passes={cell.passes}"] if cell.passes != 1 else []),
        *(f"{key}={value}" for key, value in sorted(cell.options.items())),
    ]
    return " ".join(one_line(word).replace(" ", "_") for word in words)  # a space divides words


@dataclass(frozen=True, slots=True)
class SeriesRun:
    """The results of one run. ``is_search`` where its limits were chosen by a search for floors."""

    results: Sequence[Result]
    is_search: bool = False


def summarise(runs: Iterable[SeriesRun]) -> dict[str, Series]:
    """Return the series of some runs by name, in their order; the runs' repeats count together.

    A cell with two records in one run counts with its last. A search gives one series for each
    floor: its cells without a limit, those that ended it, and the floor as a figure of theirs.
    """
    groups: dict[str, list[Result]] = {}
    floors: dict[str, list[int]] = {}
    without: dict[str, str] = {}
    for run in runs:
        for result in {result.cell.id: result for result in run.results}.values():
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
    for name, found in floors.items():
        figures = series[name].figures | {"floor": Figure.of(found)}
        series[name] = replace(series[name], figures=figures)
    for name, why in without.items():
        series[name] = replace(series[name], no_floor=why)
    return series


def _series(group: Sequence[Result]) -> Series:
    good = [result for result in group if result.outcome is Outcome.OK]
    bad = [result for result in group if result.outcome is not Outcome.OK]
    counts = Counter(result.outcome.value for result in group)
    outcome = ", ".join(f"{name} {count}" for name, count in counts.items())
    figures = {}
    for metric in METRICS.values():
        values = [value for result in good if (value := metric.read(result)) is not None]
        if values:
            figures[metric.name] = Figure.of(values)
    return Series(
        outcome=outcome if len(counts) > 1 else group[0].outcome.value,
        repeats=len(group),
        model_bytes=next((one.model_bytes for one in group if one.model_bytes), None),
        limit_bytes=group[0].cell.ram_limit_bytes,
        figures=figures,
        phases=_phases(good),
        message=bad[0].message if bad else "",
    )


def _phases(good: Iterable[Result]) -> dict[str, dict[str, int]]:
    """Return the median of every figure of every phase, over the repeats that have it."""
    seen: dict[str, dict[str, list[int]]] = {}
    for result in good:
        for name, phase in phases_of_load(result):
            figures = seen.setdefault(name, {})
            for key, read in PHASE_FIGURES.items():
                if (value := read(phase)) is not None:
                    figures.setdefault(key, []).append(value)
    return {name: _medians(figures) for name, figures in seen.items()}


def _medians(figures: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {key: median_low(values) for key, values in figures.items()}
