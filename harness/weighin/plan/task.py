"""Define a run: its cells (measurements), its settings and its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin.cell import Cell
from weighin.formats.selection import Selection
from weighin.isolation.base import Isolation
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.floor import Aim, results_of, searched, unlimited_of
from weighin.records.verdict import Reference, reference_of
from weighin.result import SCHEMA, Outcome, Result
from weighin.settings.definition import Settings

if TYPE_CHECKING:
    from weighin.suite.registry import StrategyInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned cell, why it is not to be run (``skip``), and the strategy of a load or save."""

    cell: Cell
    info: StrategyInfo | None = None
    skip: str = ""

    @property
    def strategy(self) -> StrategyInfo:
        assert self.info
        return self.info

    @property
    def selection(self) -> Selection:
        """The part of the user's checkpoint that the strategy's options key and strip_prefix select."""
        options = self.cell.options if self.cell.operation == "load" else {}
        return Selection(options.get("key", ""), options.get("strip_prefix", ""))


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks that report a run's progress, named after what begins or happens.

    ``preparing`` gets a step and its share that is done (0 to 1), ``building`` a line that Docker
    prints when it pulls an image, ``narrowed`` how close a search has come to its floor, and ``nodes``
    the step of each machine of a cluster, by its name.
    """

    preparing: Callable[[str, float | None], None] = lambda _text, _share: None
    building: Callable[[str], None] = lambda _: None
    starting: Callable[[Cell], None] = lambda _: None
    phase: Callable[[str], None] = lambda _: None
    narrowed: Callable[[str], None] = lambda _: None
    nodes: Callable[[Mapping[str, str]], None] = lambda _: None
    finished: Callable[[Result], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Run:
    """One run to perform: its cells, the folder for their records, and its settings.

    ``results`` is empty until the run has begun. The folder of a new run is removed if an error stops
    the run before its first record. ``patience_s`` is the longest time to wait for another run on this
    machine. ``is_probed``: an earlier run with the same limits has tested a worker on this machine.
    ``more_limits``: further RAM limits, each with its ranks, that the test of a worker checks.
    """

    folder: Path
    planned: Sequence[Planned]
    isolation: Isolation
    settings: Settings = field(default_factory=Settings)
    is_new: bool = False
    patience_s: float = 0
    is_probed: bool = False
    more_limits: Sequence[tuple[int | None, int]] = ()
    results: list[Result] = field(default_factory=list)

    def prepare(self, progress: Progress) -> None:
        self.isolation.prepare(progress.building)
        with run_folder.writing(samples := self.folder / "samples"):
            samples.mkdir(exist_ok=True)

    def environment(self) -> dict[str, Any]:
        about = {"isolation": self.isolation.describe()}
        return environment.machine() | environment.code() | about

    def begin(self) -> list[Result]:
        """Set ``results`` to those of the earlier records of a resumed run, and return it."""
        self.results[:] = [] if self.is_new else run_folder.read(self.folder).results
        return self.results

    def unlimited_result(self, cell: Cell) -> Result | None:
        """Return the result of the same cell without a limit; None for a cell that has no limit."""
        if cell.ram_limit_bytes is None:
            return None
        return unlimited_of(results_of(searched(cell), self.results))

    def reference_for(self, cell: Cell) -> Reference | None:
        """Return the figures of the same cell without a limit, with which weighin proves that ``cell``
        thrashes; None for a cell that may thrash until its time-out.
        """
        if self.settings.within is None or self.settings.aim is Aim.ENDS:
            return None
        return reference_of(self.unlimited_result(cell))


def skipped(planned: Planned, known_environment: dict[str, Any]) -> Result:
    """Return the result of a cell that is not run: outcome ``skipped``, message ``planned.skip``."""
    return Result(
        schema=SCHEMA,
        cell=planned.cell,
        outcome=Outcome.SKIPPED,
        message=planned.skip,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=known_environment,
    )
