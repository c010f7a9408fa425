"""Estimate how long a search for floors still takes, from the cells that it has measured."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from weighin.cell import Cell
from weighin.records.bisection import next_cell
from weighin.records.floor import Aim, bracket, results_of, searched, unlimited_of
from weighin.result import Outcome, Result

TYPICAL_CELLS: Final = 7
"""The cells of a search of one strategy: 6 if the first guess is right, seldom more than 10."""
_MOST_CELLS: Final = 60


def remaining_ns(
    cells: Sequence[Cell], results: Sequence[Result], within: float, highest: int, aim: Aim
) -> int | None:
    """Return the time until the floors of all ``cells`` are found; None without any measured cell.

    The cells to come are those that the search would measure if the floor lay in the middle of its
    bounds. Each takes the mean time of the same strategy's cells so far; those of a strategy that
    was not measured yet take the mean of all cells.
    """
    every = _mean_ns(results)
    if every is None:
        return None
    left_ns = 0
    for cell in cells:
        ours = results_of(searched(cell), results)
        each = _mean_ns(ours)
        number = _cells_left(cell, ours, within, highest, aim)
        left_ns += number * (every if each is None else each)
    return left_ns


def _cells_left(cell: Cell, ours: Sequence[Result], within: float, highest: int, aim: Aim) -> int:
    first = unlimited_of(ours)
    if first is None:
        return TYPICAL_CELLS
    bounds = bracket(ours, aim)
    failing, working = bounds.failing_bytes, bounds.working_bytes
    need = working
    if failing is not None:
        need = failing + 1 if working is None else (failing + working) // 2
    assumed = list(ours)
    for number in range(_MOST_CELLS):
        following = next_cell(cell, assumed, within, highest, aim)
        limit = following.ram_limit_bytes if following else None
        if following is None or limit is None:
            return number
        need = limit if need is None else need
        outcome = Outcome.OK if limit >= need else Outcome.OOM_KILLED
        assumed.append(replace(first, cell=following, outcome=outcome, pressure=None))
    return _MOST_CELLS


def _mean_ns(results: Sequence[Result]) -> int | None:
    times = [result.cost.wall_ns for result in results if result.cost]
    return sum(times) // len(times) if times else None
