"""Compare the records of a run with its plan: which part of the plan was measured.

A run that was stopped has fewer records than its plan has cells, and its figures look like those of a
complete run. Every reader of a run therefore gets this comparison with the records
(``run_folder.read``).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.records.bisection import next_cell
from weighin.records.floor import Aim
from weighin.records.shard import parse
from weighin.result import Result

_ANY_RAM_BYTES: Final = 1 << 62  # for records that do not tell the RAM of their machine


@dataclass(frozen=True, slots=True)
class Coverage:
    """The cells of a plan that have records; ``again`` is the command that measures the other cells.

    ``pending`` are the cells without a record. A search for floors has no fixed number of cells: its
    ``pending`` cells are those whose floor is still searched.
    """

    planned: int
    pending: tuple[Cell, ...]
    again: str
    is_search: bool = False
    shard: str = ""

    @property
    def measured(self) -> int:
        """The number of cells, or in a search of floors, that are finished."""
        return self.planned - len(self.pending)

    def __str__(self) -> str:
        """ "1 of 2 cells measured", or "1 of 2 cells of shard 1/3 measured"."""
        if self.is_search:
            return f"{self.measured} of {self.planned} searches for a floor finished"
        of_shard = f" of shard {self.shard}" if self.shard else ""
        return f"{self.measured} of {self.planned} cells{of_shard} measured"


def coverage(
    run: Path, cells: Sequence[Cell], settings: Mapping[str, Any], results: Sequence[Result]
) -> Coverage:
    """Compare the cells and the settings of the plan of ``run`` with the run's results."""
    is_search = "within" in settings
    again = resume_command(verb_of(settings), run)
    shard = str(settings.get("shard", ""))
    if is_search:
        left = _unfinished(cells, results, settings["within"], Aim(settings.get("aim", Aim.ENDS)))
        return Coverage(len(cells), tuple(left), again, is_search)
    try:
        ours = parse(shard).of(cells) if shard else cells
    except ConfigError:  # a plan that somebody edited
        ours, shard = cells, ""
    return Coverage(len(ours), tuple(pending(ours, results)), again, shard=shard)


def verb_of(settings: Mapping[str, Any]) -> str:
    """Return the verb that makes and resumes a run with the settings of this plan."""
    if "within" in settings:
        return "floor"
    return "run" if settings.get("command") else "bench"


def resume_command(verb: str, run: Path) -> str:
    """Return the command that measures the cells of a run that have no record yet."""
    return f"weighin {verb} --resume {quote(str(run))}"


def pending(cells: Iterable[Cell], results: Iterable[Result]) -> list[Cell]:
    """Return the cells without a record, in order; cells are equal if all their fields are equal."""
    # Compared as JSON, because a cell contains dicts, in which a tuple is read back as a list.
    measured = {identity(result.cell) for result in results}
    return [cell for cell in cells if identity(cell) not in measured]


def identity(cell: Cell) -> str:
    """Return a text that is equal for two cells only if all their fields are equal."""
    return json.dumps(_fields(cell), sort_keys=True, default=_fields)


def _fields(value: Any) -> Any:
    """Return a dataclass as a dict, without the copies that ``asdict`` makes; else a text."""
    return (
        {f.name: getattr(value, f.name) for f in fields(value)}
        if is_dataclass(value)
        else str(value)
    )


def _unfinished(
    cells: Sequence[Cell], results: Sequence[Result], within: float, aim: Aim
) -> list[Cell]:
    """Return the cells whose search would measure another cell, if it were resumed."""
    rams = [ram for result in results if (ram := result.environment.get("ram_bytes"))]
    highest = max(rams, default=_ANY_RAM_BYTES)
    return [cell for cell in cells if next_cell(cell, results, within, highest, aim) is not None]
