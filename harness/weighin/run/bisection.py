"""The search for a RAM floor: which cell to measure next, given all results so far.

It keeps no state of its own, so that an interrupted search goes on where it was. It begins where the
anonymous peak without a limit says that the floor should be, steps away from there until one limit
works and one fails, halves what lies between, and confirms what is left: about 6 cells.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from weighin.cell import Cell
from weighin.record import Result
from weighin.records.floor import (
    FINEST_STEP_BYTES,
    PASSES,
    bracket,
    results_of,
    searched,
    stopped_by,
    unlimited_of,
    with_room,
)
from weighin.units import MIB

# What a limit must hold beside the largest sampled anonymous memory: page tables, the kernel's own
# stock of pages for each processor, and the file pages in use. 8 to 24 MiB where it was measured.
_BESIDE_BYTES: Final = 16 * MIB


def next_cell(cell: Cell, results: Iterable[Result], within: float, highest: int) -> Cell | None:
    """Return the next cell of the search for the floor of ``cell``; None where it has ended.

    ``within`` is the step as a share of the floor; ``highest`` is the largest limit that can be
    tried, in bytes. First comes the cell without a limit: its anonymous peak says where to begin.
    """
    cell, ours = searched(cell), results_of(cell, results)
    if stopped_by(ours):
        return None
    first = unlimited_of(ours)
    if first is None:
        return cell
    limit = _next_limit(first, ours, within, highest)
    if limit is None:
        return None
    repeat = sum(one.cell.ram_limit_bytes == limit for one in ours)
    return replace(cell, ram_limit_bytes=limit, repeat=repeat)


def _next_limit(first: Result, ours: Sequence[Result], within: float, highest: int) -> int | None:
    estimate = first.peaks.anon_sampled_bytes or first.peaks.rss_bytes or FINEST_STEP_BYTES
    estimate += _BESIDE_BYTES
    known = bracket(ours)
    failing, working = known.failing_bytes, known.working_bytes
    step = _step(min(estimate, working or estimate), within)
    tried = {limit for one in ours if (limit := one.cell.ram_limit_bytes) is not None}
    jump = step << max(0, len(tried) - 1)  # twice as far each time, until there are two ends
    if failing is None and working is None:
        return min(-(-estimate // step) * step, highest)
    if working is None:
        assert failing is not None
        return min(failing + jump, highest) if failing < highest else None
    if failing is None:
        return max(working - jump, step) if working > step else None
    if working - failing > step:
        return failing + max(1, (working - failing) // step // 2) * step
    if known.passed < PASSES:
        return working
    room = with_room(working)
    return room if room not in tried and room <= highest else None


def _step(estimate: int, within: float) -> int:
    """Return the step of the search: a power of two, so that two searches try the same limits."""
    coarsest = max(FINEST_STEP_BYTES, int(estimate * within))
    return 1 << (coarsest.bit_length() - 1)
