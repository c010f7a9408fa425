"""Look up what a cell of a search needs without a limit, in the records of the search."""

from weighin.cell import Cell
from weighin.records import run_folder
from weighin.records.floor import Aim, results_of, searched, unlimited_of
from weighin.records.thrashing import Reference, reference_of
from weighin.result import Result
from weighin.run.task import Run


def unlimited_result(task: Run, cell: Cell) -> Result | None:
    """Return the result of the same cell without a limit; None if this cell has none itself."""
    if cell.ram_limit_bytes is None:
        return None
    return unlimited_of(results_of(searched(cell), run_folder.read(task.folder).results))


def reference_for(task: Run, cell: Cell) -> Reference | None:
    """Return what a cell is compared with, to end it if it thrashes; None if it is to go on."""
    if task.settings.within is None or task.settings.aim is Aim.ENDS:
        return None
    return reference_of(unlimited_result(task, cell))
