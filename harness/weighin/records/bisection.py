"""Choose the next cell (measurement) of a search for a RAM floor, and estimate the remaining time.

The search keeps no state besides the results, so that an interrupted search can be resumed. The
first cell has no limit. Its anonymous and shared memory, plus a margin, is the estimate of the
floor and the first limit to try. The next limits move away from the estimate until one limit works
and one limit fails. The search then halves the interval between the largest failing limit and the
smallest working limit, until the interval is one step. It repeats the cell under the smallest
working limit, and measures one cell under a limit 10 % larger. A search takes 6 cells if the floor
is the estimate or one step above the estimate.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from weighin.cell import Cell
from weighin.records import after_load
from weighin.records.floor import (
    PASSES,
    Aim,
    bracket,
    finest_step,
    results_of,
    searched,
    stopped_by,
    unlimited_of,
    with_room,
)
from weighin.result import Outcome, Result
from weighin.units import MIB

TYPICAL_CELLS: Final = 7
"""The expected number of cells in a search for one floor; most searches take 6 to 10 cells."""
_MOST_CELLS: Final = 60

_LEAST_OF_DOCKER: Final = 6 * MIB  # the Docker engine refuses a smaller limit
# A limit must also cover page tables and the kernel's per-CPU page lists: the floors of copying loads
# were 4 to 9 MiB above the sampled maximum of anonymous memory for a load of 1.5 GiB.
_BESIDE_COPIES_BYTES: Final = 4 * MIB
_PAGE_TABLE_SHARE: Final = 512
# The limit of a mapped load must also cover the pages of libraries and of the file that are in use.
_BESIDE_BYTES: Final = 16 * MIB


def next_cell(
    cell: Cell,
    results: Iterable[Result],
    within: float,
    highest: int,
    aim: Aim = Aim.SURVIVES,
) -> Cell | None:
    """Return the next cell to measure in the search for the RAM floor of ``cell``; None at its end.

    ``within`` is the wanted precision, as a share of the floor. ``highest`` is the largest limit to
    try, in bytes.
    """
    cell, ours = searched(cell), results_of(cell, results)
    if stopped_by(ours):
        return None
    first = unlimited_of(ours)
    if first is None:
        return cell
    limit = _next_limit(first, ours, within, highest, aim)
    if limit is None:
        return None
    repeat = sum(result.cell.ram_limit_bytes == limit for result in ours)
    return replace(cell, ram_limit_bytes=limit, repeat=repeat)


def _next_limit(
    first: Result, ours: Sequence[Result], within: float, highest: int, aim: Aim
) -> int | None:
    finest = finest_step(first.cell)
    estimate = _estimate(first, aim) or finest
    bounds = bracket(ours, aim)
    failing, working = bounds.failing_bytes, bounds.working_bytes
    step = _step(min(estimate, working or estimate), within, finest)
    tried = {limit for result in ours if (limit := result.cell.ram_limit_bytes) is not None}
    # The second and the third limit are one step away from the limit before; then the distance doubles.
    jump = step << max(0, len(tried) - 2)
    least = max(step, _LEAST_OF_DOCKER) if first.cell.isolation == "docker" else step
    if failing is None and working is None:
        return min(max(-(-estimate // step) * step, least), highest)
    if working is None:
        assert failing is not None
        return min(failing + jump, highest) if failing < highest else None
    if failing is None:
        return max(working - jump, least) if working > least else None
    if working - failing > step:
        return failing + max(1, (working - failing) // step // 2) * step
    if bounds.passed < PASSES:
        return working
    room = with_room(working)
    return room if room not in tried and room <= highest else None


def _estimate(first: Result, aim: Aim) -> int | None:
    """Estimate the floor, in bytes, from the result without a limit; None if it has no peaks."""
    if first.ran:
        needed = first.ran.needed_bytes
        return needed and needed + min(_BESIDE_BYTES, MIB + needed // 64)
    peaks = first.peaks
    sampled = peaks.unreclaimable_sampled_bytes or peaks.anon_sampled_bytes or peaks.rss_bytes
    if not sampled:
        return None
    in_use = after_load.needed_bytes(first)
    if in_use > sampled or not _is_mapped(first):
        sampled = max(in_use, sampled)
        return sampled + sampled // _PAGE_TABLE_SHARE + _BESIDE_COPIES_BYTES
    # With a smaller limit, the kernel reads ahead less: the load ends, but reads pages repeatedly.
    return sampled + _BESIDE_BYTES + (first.in_flight_bytes if aim is Aim.SURVIVES else 0)


def _is_mapped(first: Result) -> bool:
    """Return whether most of the loaded model was in mapped file pages, not in anonymous memory."""
    peaks, before, size = first.peaks, first.baseline, first.model_bytes
    if not before or not size or peaks.file_sampled_bytes is None:
        return False
    files = peaks.file_sampled_bytes - before.file_bytes
    copies = (peaks.anon_sampled_bytes or 0) - before.anon_bytes * first.cell.ranks
    return 2 * files > size > 2 * copies


def _step(estimate: int, within: float, finest: int) -> int:
    """Return the step between the limits to try, in bytes.

    The step is a power of two, so that repeated searches try the same limits.
    """
    coarsest = max(finest, int(estimate * within))
    return 1 << (coarsest.bit_length() - 1)


def remaining_ns(
    cells: Sequence[Cell], results: Sequence[Result], within: float, highest: int, aim: Aim
) -> int | None:
    """Return the expected time until all searches for floors end; None before the first result.

    Each floor is assumed to lie in the middle between its known bounds. Each remaining measurement
    is expected to take the mean time of the earlier measurements for the same floor. If there are
    none, it is expected to take the mean time of all ``results``.
    """
    every = _mean_ns(results)
    if every is None:
        return None
    left_ns = 0
    for cell in cells:
        ours = results_of(searched(cell), results)
        each = _mean_ns(ours)
        left_ns += _cells_left(cell, ours, within, highest, aim) * (every if each is None else each)
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
