"""Define a run: its cells, its settings and its folder, and write its plan.json."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.isolation.base import Isolation
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.floor import Aim, results_of, searched, unlimited_of
from weighin.records.thrashing import Reference, reference_of
from weighin.result import SCHEMA, Outcome, Result
from weighin.run.measurement import CellMeasurement
from weighin.run.settings import RunSettings
from weighin.units import format_exact

if TYPE_CHECKING:
    from weighin.suite.matrix import Planned


@dataclass(frozen=True, slots=True)
class PlannedCommand:
    """A cell that runs a command. No command is skipped, so ``skip`` is always empty."""

    cell: Cell
    skip: str = ""


AnyPlanned: TypeAlias = "Planned | PlannedCommand"


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks that report a run's progress. The run calls each one at the event that is named here.

    Attributes:
        preparing: a step of the preparation begins, or a share of it (0 to 1) is done.
        building: the isolation prints a line, such as Docker while it builds an image.
        starting: a cell starts.
        phase: a phase of the cell begins.
        narrowed: a search has come closer to the smallest working limit; the argument says how far.
        nodes: a machine (node) of a cluster begins a step; the argument maps each node's name to
            its step.
        finished: a cell has a record.
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

    Attributes:
        results: the results of the cells that have a record; empty until the run has begun.
        is_new: whether the run is new, and not resumed. A new run's folder is removed if an error
            stops the run before its first record.
        patience_s: the longest time to wait for the end of another run on this machine, in seconds.
        is_probed: whether an earlier run with the same limits has tested a worker on this machine,
            so that this run need not repeat the test.
    """

    folder: Path
    planned: Sequence[AnyPlanned]
    isolation: Isolation
    settings: RunSettings = field(default_factory=RunSettings)
    is_new: bool = False
    patience_s: float = 0
    is_probed: bool = False
    results: list[Result] = field(default_factory=list)

    def prepare(self, progress: Progress) -> None:
        """Prepare the isolation, and create the folder for the cells' samples (memory readings)."""
        self.isolation.prepare(progress.building)
        with run_folder.writing(samples := self.folder / "samples"):
            samples.mkdir(exist_ok=True)

    def environment(self) -> dict[str, Any]:
        """Return facts about this machine, the software's versions and the isolation, for records."""
        about = {"isolation": self.isolation.describe()}
        return environment.machine() | environment.code() | about

    def begin(self) -> list[Result]:
        """Set ``results`` to those of the earlier records of a resumed run, and return it."""
        self.results[:] = [] if self.is_new else run_folder.read(self.folder).results
        return self.results

    def unlimited_result(self, cell: Cell) -> Result | None:
        """Return the recorded result of the same cell without a limit. Return None if there is no
        such result, or if ``cell`` itself has no limit.
        """
        if cell.ram_limit_bytes is None:
            return None
        return unlimited_of(results_of(searched(cell), self.results))

    def reference_for(self, cell: Cell) -> Reference | None:
        """Return the figures of the same cell without a limit, with which weighin proves that
        ``cell`` thrashes.

        ``reference_for`` returns None for a cell that may thrash until its time-out, and if no cell
        without a limit was measured.
        """
        if self.settings.within is None or self.settings.aim is Aim.ENDS:
            return None
        return reference_of(self.unlimited_result(cell))


class Bench(Protocol):
    """The prepared checkpoints and settings of a run; ``measure`` measures one cell."""

    @property
    def environment(self) -> dict[str, Any]:
        """Facts about the machine and the software's versions, for each record."""

    def measure(self, planned: Any) -> CellMeasurement:
        """Measure one cell."""


def skipped(planned: AnyPlanned, known_environment: dict[str, Any]) -> Result:
    """Return the result of a cell that is not run: outcome ``skipped``, message ``planned.skip``."""
    return Result(
        schema=SCHEMA,
        cell=planned.cell,
        outcome=Outcome.SKIPPED,
        message=planned.skip,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=known_environment,
    )


def new_folder(labels: Iterable[str], limits: Iterable[int | None], *, is_search: bool) -> Path:
    """Return the path of a new run's folder: ``results/TIME-LABELS-LIMITS``, or, where no folder can
    be made here, below a new temporary folder.
    """
    words = [datetime.now().astimezone().strftime("%Y%m%dT%H%M%S")]
    words += [re.sub(r"[^\w.+-]+", "_", label).strip("._-") or "unnamed" for label in labels]
    words += (
        ["floor"] if is_search else [format_exact(limit) for limit in limits if limit is not None]
    )
    results = Path("results")
    if not _can_write(results):
        results = Path(tempfile.mkdtemp(prefix="weighin-results-"))
    name, number = "-".join(words), 1
    while (folder := results / (f"{name}-{number}" if number > 1 else name)).exists():
        number += 1  # of another run in the same second
    return folder


def _can_write(results: Path) -> bool:
    """Return whether folders can be made in ``results``, which may not exist yet."""
    with suppress(FileNotFoundError):
        here = results if results.exists() else Path.cwd()  # which may have been deleted
        return os.access(here, os.W_OK | os.X_OK)
    return False


def write_plan(
    folder: Path, planned: Sequence[AnyPlanned], isolation: Isolation, settings: RunSettings
) -> Run:
    """Write all cells to a new run's plan; return the run with the cells of its shard (its part).

    Raises:
        RecordError: the folder already contains a run, or cannot be written.
        ConfigError: the plan has fewer cells than shards.
    """
    if (folder / run_folder.RECORDS).exists():
        raise run_folder.already_there(folder, settings.verb)
    ours = settings.shard.of(planned) if settings.shard else planned
    if not ours:
        raise ConfigError(
            f"--shard {settings.shard}: the plan has only {len(planned)} cells",
            f"divide the plan into {len(planned)} shards at most",
        )
    cells = [each.cell for each in planned]
    run_folder.write_plan(folder, cells, settings.as_json(), is_new=True)
    return Run(folder, ours, isolation, settings, is_new=True)
