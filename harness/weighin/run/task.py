"""Define one run to perform, and the bench that measures its cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from weighin.cell import Cell
from weighin.errors import RecordError
from weighin.isolation.base import Isolation
from weighin.record import SCHEMA, Outcome, Result
from weighin.records import run_folder
from weighin.run.measurement import CellMeasurement
from weighin.run.settings import RunSettings

if TYPE_CHECKING:
    from weighin.suite.matrix import Planned


@dataclass(frozen=True, slots=True)
class PlannedCommand:
    """A cell that runs a command; ``skip`` is always empty, because nothing is known beforehand."""

    cell: Cell
    skip: str = ""


AnyPlanned: TypeAlias = "Planned | PlannedCommand"


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks that report the progress of a run; each is called when its step begins or ends.

    ``nodes`` gets the current step of each node, by the node's name, when a step of a fleet begins.
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

    If a run that ``is_new`` fails before its first record, its folder is removed. ``patience_s`` is
    the longest time to wait for another run on this machine to end. If ``is_probed``, an earlier run
    with the same limits has tested a worker on this machine, and this run does not repeat the test.
    """

    folder: Path
    planned: Sequence[AnyPlanned]
    isolation: Isolation
    settings: RunSettings = field(default_factory=RunSettings)
    is_new: bool = False
    patience_s: float = 0
    is_probed: bool = False


class Bench(Protocol):
    """The prepared resources that all cells of a run share, and the measurement of one cell."""

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and the versions, for each record."""
        ...

    def measure(self, planned: Any) -> CellMeasurement:
        """Measure one cell, and return what is to be recorded."""
        ...


def skipped(planned: AnyPlanned, known_environment: dict[str, Any]) -> Result:
    """Return the result of a cell that is not run, with the reason."""
    return Result(
        schema=SCHEMA,
        cell=planned.cell,
        outcome=Outcome.SKIPPED,
        message=planned.skip,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=known_environment,
    )


def check_folder(folder: Path, verb: str) -> None:
    """Raise RecordError if the folder of a new run already contains a run."""
    if (folder / run_folder.PLAN).exists() or (folder / run_folder.RECORDS).exists():
        raise RecordError(
            f"{folder} already contains a run",
            f"resume it: weighin {verb} --resume {quote(str(folder))}; or name another folder with --out",
        )
