"""Search and compute RAM floors: the smallest RAM limit under which a load or command survives, or
just ends. Both need only the results so far, so that an interrupted search can be resumed.

A limit *works* if every cell (measurement) under it ended ok, and *fails* if one was killed for lack of
memory, timed out, or thrashed (``weighin.records.verdict``) in a search for a floor that a load *survives*.
The floor is the smallest working limit above all failing limits. It is confirmed if ``PASSES`` cells end ok
under it, and one fails at most ``COARSEST`` of the floor, or ``finest_step``, below it.

The cell without a limit gives the first limit to try. The next limits move away from it until one works and
one fails. The search then halves the interval, repeats the cell under the smallest working limit, and
measures one cell under a limit 10 % larger, to show how long it takes there.
"""

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Final

from weighin.cell import Cell
from weighin.records.metrics import grouped, middle, use_needed_bytes
from weighin.records.verdict import Judgement, Typical, Verdict, judge_all, typical
from weighin.result import WINDOWS_IN_FLIGHT, Outcome, Result
from weighin.units import MIB, format_bytes, format_exact

PASSES: Final = 3
COARSEST: Final = 0.10
KILLED: Final = "killed"
# A limit must also cover page tables and the kernel's per-CPU page lists: the floors of copying loads
# were 4 to 9 MiB above the sampled maximum of anonymous memory for a load of 1.5 GiB.
_BESIDE_COPIES_BYTES: Final = 4 * MIB
_PAGE_TABLE_SHARE: Final = 512
# The limit of a mapped load must also cover the pages of libraries and of the file that are in use.
_BESIDE_BYTES: Final = 16 * MIB
_LACKING: Final = {
    Outcome.OOM_KILLED: KILLED,
    Outcome.CHILD_KILLED: KILLED,
    Outcome.TIMEOUT: "timed out",
    Outcome.THRASHING: Verdict.THRASHES.value,
}
"""The outcomes that show that a limit fails, in words."""


class Aim(StrEnum):
    SURVIVES = "survives"
    ENDS = "ends"


def searched(cell: Cell) -> Cell:
    """Remove the limit and repeat number of a cell; cells that are then equal share one floor."""
    return replace(cell, ram_limit_bytes=None, repeat=0)


def finest_step(cell: Cell) -> int:
    return MIB if cell.operation == "command" else 8 * MIB


class Floor:
    """The search for the RAM floor of a load or command, as far as its results show. Without a floor,
    ``bytes`` is None and ``message`` says why; results/README.md describes what ``weighin floor --json`` prints.

    ``first`` is the first result without a limit, ``stop`` says which result ends the search without a
    floor, and ``oks`` cells ended ok under ``working_bytes``.
    """

    def __init__(self, cell: Cell, results: Iterable[Result], aim: Aim) -> None:
        self.cell, self.aim = searched(cell), aim
        self.results = ours = [one for one in results if searched(one.cell) == self.cell]
        self.by_limit = grouped(ours, lambda one: one.cell.ram_limit_bytes)
        self.first = next(iter(self.by_limit.get(None, ())), None)
        self.stop, judgements = next(filter(None, map(why_stopped, ours)), ""), judge_all(ours)
        ends = {
            limit: [_failure(one, judgements[one.cell.id], aim) for one in repeats]
            for limit, repeats in self.by_limit.items()
            if limit is not None
        }
        self.failing_bytes = failing = max((each for each in ends if any(ends[each])), default=None)
        works = (each for each in ends if {*ends[each]} == {""} and each > (failing or 0))
        self.working_bytes = working = min(works, default=None)
        self.oks = len(ends.get(working or 0, ()))

        self.cells = len(ours)
        self.model_bytes = size = next((one.model_bytes for one in ours if one.model_bytes), None)
        self.import_bytes = imported = middle(one.import_bytes for one in ours)
        self.message = self.stop or self._lacking()
        self.bytes = found = None if self.message else working
        self.per_model = found / size if found and size else None
        above = None if found is None or imported is None else found - imported
        self.above_import_per_model = None if above is None or not size else above / size
        self.room_bytes = round((working or 0) * 1.1 / MIB) * MIB
        self.step_bytes = found - (failing or 0) if found else None
        failed = [*filter(None, ends.get(failing or 0, ()))] if found else []
        self.below, self.failed = ", ".join(dict.fromkeys(failed)), len(failed)
        self.passed = self.oks if found else 0
        lives = {each: typical(same, judgements) for each, same in self.by_limit.items()}
        self.unlimited = lives.get(None)
        self.at_floor = lives[found] if found else None
        self.with_room = lives.get(self.room_bytes) if found else None

    def _lacking(self) -> str:
        """Say what a search that no result stopped lacks for a floor; empty if nothing."""
        failing, working = self.failing_bytes, self.working_bytes
        if working is None or failing is None:
            does, limit = "works" if working else "fails", working or failing
            return f"{does} even under {format_bytes(limit)}" if limit else "not searched"
        is_wide = working - failing > max(finest_step(self.cell), int(working * COARSEST))
        between = f"above {format_bytes(failing)}, at most {format_bytes(working)}"
        is_open = is_wide or self.oks < PASSES
        return f"{between}: the search is not finished" if is_open else ""

    def times(self, under: Typical | None) -> float | None:
        spent_ns, unlimited_ns = (one and one.spent_ns for one in (under, self.unlimited))
        return spent_ns / unlimited_ns if spent_ns and unlimited_ns else None


def _failure(result: Result, judgement: Judgement | None, aim: Aim) -> str | None:
    """Return in words how a result shows that its limit fails; empty if it shows that its limit works,
    None if it shows neither, as a cell for ``Aim.ENDS`` that weighin killed because it thrashed.
    """
    outcome = result.outcome
    if outcome not in (Outcome.OK, Outcome.THRASHING):
        return _LACKING.get(outcome)
    thrashes = outcome is Outcome.THRASHING or (judgement and judgement.verdict is Verdict.THRASHES)
    if thrashes and aim is Aim.SURVIVES:
        return Verdict.THRASHES.value
    return "" if outcome is Outcome.OK else None


def why_stopped(result: Result) -> str:
    """Say why a result ends the search without a floor; empty if the search goes on."""
    limit, outcome = result.cell.ram_limit_bytes, result.outcome
    if outcome is Outcome.OK or (limit is not None and outcome in _LACKING):
        return ""
    where = "without a limit" if limit is None else f"under {format_exact(limit)}"
    return f"{outcome} {where}" + f": {result.message}" * bool(result.message)


def next_cell(
    cell: Cell, results: Iterable[Result], within: float, highest: int, aim: Aim = Aim.SURVIVES
) -> Cell | None:
    """Return the next cell to measure in the search for the RAM floor of ``cell``; None at its end.
    ``within`` is the wanted precision, as a share of the floor, and ``highest`` the largest limit to
    try, in bytes.
    """
    floor = Floor(cell, results, aim)
    cell, failing, working = floor.cell, floor.failing_bytes, floor.working_bytes
    if floor.stop or floor.first is None:
        return None if floor.stop else cell
    finest, repeats = finest_step(cell), floor.by_limit
    estimate = _estimate(floor.first, aim) or finest
    # The step is a power of two, so that repeated searches try the same limits.
    coarsest = max(finest, int(min(estimate, working or estimate) * within))
    step = 1 << (coarsest.bit_length() - 1)
    # The second and the third limit are one step away from the limit before; then the distance doubles.
    jump = step << max(0, len(repeats) - 3)
    least = max(step, 6 * MIB) if cell.isolation == "docker" else step  # the engine refuses less
    limit: int | None = None
    if working is None:
        if failing is None:
            limit = min(max(-(-estimate // step) * step, least), highest)
        elif failing < highest:
            limit = min(failing + jump, highest)
    elif failing is None:
        limit = max(working - jump, least) if working > least else None
    elif working - failing > step:
        limit = failing + max(1, (working - failing) // step // 2) * step
    elif floor.oks < PASSES:
        limit = working
    elif floor.room_bytes not in repeats and floor.room_bytes <= highest:
        limit = floor.room_bytes
    if limit is None:
        return None
    return replace(cell, ram_limit_bytes=limit, repeat=len(repeats.get(limit, ())))


def _estimate(first: Result, aim: Aim) -> int | None:
    """Estimate the floor, in bytes, from the result without a limit; None if it has no peaks."""
    if first.ran:
        needed = first.ran.needed_bytes
        return needed and needed + min(_BESIDE_BYTES, MIB + needed // 64)
    peaks = first.peaks
    sampled = peaks.unreclaimable_sampled_bytes or peaks.anon_sampled_bytes or peaks.rss_bytes
    if not sampled:
        return None
    before, size, needed = first.baseline, first.model_bytes, max(sampled, use_needed_bytes(first))
    if before and size and needed == sampled:
        files = (peaks.file_sampled_bytes or 0) - before.file_bytes
        copies = (peaks.anon_sampled_bytes or 0) - before.anon_bytes * first.cell.ranks
        if 2 * files > size > 2 * copies:  # most of the model is in mapped pages of the file
            # With a smaller limit, the kernel reads ahead less: the load ends, but reads pages repeatedly.
            windows = WINDOWS_IN_FLIGHT if aim is Aim.SURVIVES else 0
            ahead_bytes = int(first.environment.get("read_ahead_bytes", 0))
            return needed + _BESIDE_BYTES + windows * ahead_bytes
    return needed + needed // _PAGE_TABLE_SHARE + _BESIDE_COPIES_BYTES


def floors(results: Iterable[Result]) -> list[Floor]:
    """Return a ``Floor`` for each search that has a cell without a limit, even if the search found none. Its
    kind is ``Aim.ENDS`` only if the search found a floor of this kind and none of ``Aim.SURVIVES``.
    """
    found = []
    for ours in grouped(results, lambda one: searched(one.cell).series).values():
        survived, ended = (Floor(ours[0].cell, ours, aim) for aim in Aim)
        if survived.first:
            found.append(ended if survived.bytes is None and ended.bytes else survived)
    return found
