"""Compare a run's records with its plan, or its shard, to find planned cells without a record.

The records of a stopped run look like those of a complete run. ``run_folder.read`` therefore
returns a ``Coverage`` together with the records.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final, TypeVar

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.records.floor import Aim, next_cell
from weighin.result import Result

_Cell = TypeVar("_Cell")
_ANY_RAM_BYTES: Final = 1 << 62  # stands for the machine's RAM if no record tells the size


@dataclass(frozen=True, slots=True)
class Shard:
    """Every ``count``-th cell of a plan, beginning with the cell number ``index``, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, cells: Sequence[_Cell]) -> Sequence[_Cell]:
        return cells[self.index - 1 :: self.count]


def parse_shard(text: str) -> Shard:
    """Return the shard in the text of --shard, such as "2/8"; or raise ConfigError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match and 1 <= int(match[1]) <= int(match[2]):
        return Shard(int(match[1]), int(match[2]))
    raise ConfigError(
        f"--shard: cannot read {text!r}",
        "write the shard's number, from 1, and the number of shards: --shard 2/8",
        option="--shard",
    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of cells that a run or its shard plans, and ``pending``: those without a record.

    ``again`` is the command that measures the pending cells. A search for RAM floors has no fixed
    number of cells; there, a cell is pending until the search for its floor has ended.
    """

    planned: int
    pending: tuple[Cell, ...]
    again: str
    is_search: bool = False
    shard: str = ""

    @property
    def measured(self) -> int:
        return self.planned - len(self.pending)

    def __str__(self) -> str:
        """Return "1 of 2 cells of shard 1/3 measured" or "1 of 2 searches for a floor finished"."""
        if self.is_search:
            return f"{self.measured} of {self.planned} searches for a floor finished"
        of_shard = f" of shard {self.shard}" if self.shard else ""
        return f"{self.measured} of {self.planned} cells{of_shard} measured"


def coverage(
    run: Path, cells: Sequence[Cell], settings: Mapping[str, Any], results: Sequence[Result]
) -> Coverage:
    """Compare the planned ``cells`` with the results of ``run``; ``settings`` are the plan's."""
    is_search = "within" in settings
    again = resume_command(verb_of(settings), run)
    shard = str(settings.get("shard", ""))
    if is_search:
        rams = (ram for result in results if (ram := result.environment.get("ram_bytes")))
        how = (
            settings["within"],
            max(rams, default=_ANY_RAM_BYTES),
            Aim(settings.get("aim", "ends")),
        )
        left = tuple(cell for cell in cells if next_cell(cell, results, *how))
        return Coverage(len(cells), left, again, is_search)
    try:
        ours = parse_shard(shard).of(cells) if shard else cells
    except ConfigError:  # somebody edited the plan
        ours, shard = cells, ""
    return Coverage(len(ours), tuple(pending(ours, results)), again, shard=shard)


def verb_of(settings: Mapping[str, Any]) -> str:
    if "within" in settings:
        return "floor"
    return "run" if settings.get("commands") or settings.get("command") else "bench"


def resume_command(verb: str, run: Path) -> str:
    return f"weighin {verb} --resume {quote(str(run))}"


def pending(cells: Iterable[Cell], results: Iterable[Result]) -> list[Cell]:
    """Return the cells without a result, in order; a result's cell must be equal in all fields."""
    # Compared as JSON, because a tuple inside a cell's dicts is a list after the record is read.
    measured = {identity(result.cell) for result in results}
    return [cell for cell in cells if identity(cell) not in measured]


def identity(cell: Cell) -> str:
    """Return a text that is equal for two cells only if all their fields are equal."""
    return json.dumps(cell, sort_keys=True, default=as_json)


def as_json(value: Any) -> Any:
    """Return a dataclass as a dict without a deep copy, and any other value as text: the ``default`` of
    ``json.dumps`` for records, plans and cells.
    """
    return (
        {f.name: getattr(value, f.name) for f in fields(value)}
        if is_dataclass(value)
        else str(value)
    )
