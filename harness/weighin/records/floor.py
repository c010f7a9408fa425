"""Search and compute RAM floors: the smallest RAM limit under which a load or command survives, or
just ends. Both need only the results so far, so that an interrupted search can be resumed.

A limit *works* if every cell (measurement) under it ended ok. It *fails* if, in a cell under it, the
kernel killed a process for lack of memory, the cell timed out, or, for a floor that a load *survives*
(``Aim``), the cell thrashes (``weighin.records.verdict``).

The floor is the smallest working limit above all failing limits. It is confirmed if ``PASSES`` cells
end ok under it, and a cell fails under a limit that is smaller by at most ``COARSEST`` of the floor,
or by at most ``finest_step``. A cell that fails for a reason other than memory, or that is not ok
without a limit, ends the search without a floor.

The first cell of a search has no limit, and gives an estimate of the floor: the first limit to try.
The next limits move away from it until one works and one fails. The search then halves the interval
between the largest failing and the smallest working limit, until it is one step; repeats the cell
under the smallest working limit; and measures one cell under a limit 10 % larger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from weighin.cell import Cell
from weighin.records.metrics import grouped, middle, use_needed_bytes
from weighin.records.verdict import Judgement, Typical, Verdict, judge_all, typical
from weighin.result import Outcome, Result
from weighin.units import MIB, format_bytes, format_exact

PASSES: Final = 3
COARSEST: Final = 0.10
"""A reported floor exceeds the largest failing limit by this share at most, or ``finest_step``."""
ROOM: Final = 1.1
"""A search also measures a cell under ``ROOM`` times the floor, to show how long it takes there."""
KILLED: Final = "killed"
TYPICAL_CELLS: Final = 7
"""The expected number of cells in a search for one floor; most searches take 6 to 10 cells."""
_LEAST_OF_DOCKER: Final = 6 * MIB  # the Docker engine refuses a smaller limit
# A limit must also cover page tables and the kernel's per-CPU page lists: the floors of copying loads
# were 4 to 9 MiB above the sampled maximum of anonymous memory for a load of 1.5 GiB.
_BESIDE_COPIES_BYTES: Final = 4 * MIB
_PAGE_TABLE_SHARE: Final = 512
# The limit of a mapped load must also cover the pages of libraries and of the file that are in use.
_BESIDE_BYTES: Final = 16 * MIB


class Aim(StrEnum):
    SURVIVES = "survives"
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Floor:
    """The RAM floor of a load or command; without one, ``bytes`` is None and ``message`` says why.
    results/README.md describes the other fields, which ``weighin floor --json`` prints.
    """

    cell: Cell
    cells: int
    aim: Aim
    model_bytes: int | None
    import_bytes: int | None
    unlimited: Typical | None
    bytes: int | None = None
    message: str = ""
    step_bytes: int | None = None
    below: str = ""
    passed: int = 0
    failed: int = 0
    at_floor: Typical | None = None
    with_room: Typical | None = None

    @property
    def per_model(self) -> float | None:
        return self.bytes / self.model_bytes if self.bytes and self.model_bytes else None

    @property
    def above_import_per_model(self) -> float | None:
        if self.bytes is None or self.import_bytes is None or not self.model_bytes:
            return None
        return (self.bytes - self.import_bytes) / self.model_bytes

    def times(self, under: Typical | None) -> float | None:
        spent_ns = under.spent_ns if under else None
        unlimited_ns = self.unlimited.spent_ns if self.unlimited else None
        return spent_ns / unlimited_ns if spent_ns and unlimited_ns else None


def next_cell(
    cell: Cell,
    results: Iterable[Result],
    within: float,
    highest: int,
    aim: Aim = Aim.SURVIVES,
) -> Cell | None:
    """Return the next cell to measure in the search for the RAM floor of ``cell``; None at its end.
    ``within`` is the wanted precision, as a share of the floor, and ``highest`` the largest limit to
    try, in bytes.
    """
    search = Search(cell, results, aim)
    cell, failing, working = search.cell, search.failing_bytes, search.working_bytes
    if search.stop or search.unlimited is None:
        return None if search.stop else cell
    finest = finest_step(cell)
    estimate = _estimate(search.unlimited, aim) or finest
    # The step is a power of two, so that repeated searches try the same limits.
    coarsest = max(finest, int(min(estimate, working or estimate) * within))
    step = 1 << (coarsest.bit_length() - 1)
    repeats = search.by_limit
    # The second and the third limit are one step away from the limit before; then the distance doubles.
    jump = step << max(0, len(repeats) - 3)
    least = max(step, _LEAST_OF_DOCKER) if cell.isolation == "docker" else step
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
    elif search.passed < PASSES:
        limit = working
    elif (room := _with_room(working)) not in repeats and room <= highest:
        limit = room
    return (
        None
        if limit is None
        else replace(cell, ram_limit_bytes=limit, repeat=len(repeats.get(limit, ())))
    )


def _estimate(first: Result, aim: Aim) -> int | None:
    """Estimate the floor, in bytes, from the result without a limit; None if it has no peaks."""
    if first.ran:
        needed = first.ran.needed_bytes
        return needed and needed + min(_BESIDE_BYTES, MIB + needed // 64)
    peaks, before, size = first.peaks, first.baseline, first.model_bytes
    sampled = peaks.unreclaimable_sampled_bytes or peaks.anon_sampled_bytes or peaks.rss_bytes
    if not sampled:
        return None
    is_mapped = False  # whether most of the model was in mapped file pages, not in anonymous memory
    if before and size and peaks.file_sampled_bytes is not None:
        files = peaks.file_sampled_bytes - before.file_bytes
        copies = (peaks.anon_sampled_bytes or 0) - before.anon_bytes * first.cell.ranks
        is_mapped = 2 * files > size > 2 * copies
    in_use = use_needed_bytes(first)
    if in_use > sampled or not is_mapped:
        sampled = max(in_use, sampled)
        return sampled + sampled // _PAGE_TABLE_SHARE + _BESIDE_COPIES_BYTES
    # With a smaller limit, the kernel reads ahead less: the load ends, but reads pages repeatedly.
    return sampled + _BESIDE_BYTES + (first.in_flight_bytes if aim is Aim.SURVIVES else 0)


def remaining_ns(
    cells: Sequence[Cell], results: Sequence[Result], within: float, highest: int, aim: Aim
) -> int | None:
    """Return the expected time until all searches for floors end; None before the first result. Each
    search takes about ``TYPICAL_CELLS`` measurements, of the mean time of the earlier ones.
    """
    left_ns, times = 0, [result.cost.wall_ns for result in results if result.cost]
    for cell in cells if times else ():
        if next_cell(cell, results, within, highest, aim):
            ours = Search(cell, results, aim).results
            own = [result.cost.wall_ns for result in ours if result.cost] or times
            left_ns += max(TYPICAL_CELLS - len(ours), 1) * sum(own) // len(own)
    return left_ns if times else None


def finest_step(cell: Cell) -> int:
    return MIB if cell.operation == "command" else 8 * MIB


def _with_room(floor_bytes: int) -> int:
    return round(floor_bytes * ROOM / MIB) * MIB


def searched(cell: Cell) -> Cell:
    """Remove the limit and repeat number of a cell; cells that are then equal share one floor."""
    return replace(cell, ram_limit_bytes=None, repeat=0)


class Search:
    """The results of the search for one floor so far, and what they show.

    Attributes:
        unlimited: the first result without a limit.
        stop: which result ends the search without a floor; empty if none does.
        failing_bytes, working_bytes: the floor is above the one, and not above the other.
        passed: the number of cells that ended ok under ``working_bytes``.
        failed: how each cell failed under ``failing_bytes``.
    """

    def __init__(self, cell: Cell, results: Iterable[Result], aim: Aim) -> None:
        self.cell, self.aim = searched(cell), aim
        self.results = [one for one in results if searched(one.cell) == self.cell]
        self.by_limit = grouped(self.results, lambda one: one.cell.ram_limit_bytes)
        self.unlimited = next(iter(self.by_limit.get(None, ())), None)
        self.stop, self.judgements = why_stopped(self.results), judge_all(self.results)
        ends = {
            limit: [_failure(one, self.judgements[one.cell.id], aim) for one in repeats]
            for limit, repeats in self.by_limit.items()
            if limit is not None
        }
        self.failing_bytes = failing = max((each for each in ends if any(ends[each])), default=None)
        works = (each for each in ends if {*ends[each]} == {""} and each > (failing or 0))
        self.working_bytes = min(works, default=None)
        self.passed = len(ends.get(self.working_bytes or 0, ()))
        self.failed = tuple(filter(None, ends.get(failing or 0, ())))


def _failure(result: Result, judgement: Judgement | None, aim: Aim) -> str | None:
    """Return in words how a result shows that its limit fails; empty if it shows that its limit works,
    None if it shows neither, as a cell for ``Aim.ENDS`` that weighin killed because it thrashed.
    """
    if result.outcome in (Outcome.OOM_KILLED, Outcome.CHILD_KILLED):
        return KILLED
    if result.outcome is Outcome.TIMEOUT:
        allowed_s = result.stopped.timeout_s if result.stopped else None
        return f"timed out after {allowed_s:g} s" if allowed_s else "timed out"
    is_ok, is_ended = result.outcome is Outcome.OK, result.outcome is Outcome.THRASHING
    thrashes = is_ended or (is_ok and judgement and judgement.verdict is Verdict.THRASHES)
    if thrashes and aim is Aim.SURVIVES:
        return Verdict.THRASHES.value
    return "" if is_ok else None


def why_stopped(ours: Iterable[Result]) -> str:
    """Say which result ends the search without a floor; empty if none does. Under a limit, it is one
    that was not killed for lack of memory, and did not time out or thrash.
    """
    lacking = (Outcome.OOM_KILLED, Outcome.CHILD_KILLED, Outcome.TIMEOUT, Outcome.THRASHING)
    for result in ours:
        limit = result.cell.ram_limit_bytes
        if result.outcome is Outcome.OK or (limit is not None and result.outcome in lacking):
            continue
        if result.outcome is Outcome.MEASUREMENT_FAILED:
            return f"could not be measured: {result.message}"
        where = "without a limit" if limit is None else f"under {format_exact(limit)}"
        return f"{result.outcome} {where}" + f": {result.message}" * bool(result.message)
    return ""


def floors(results: Iterable[Result]) -> list[Floor]:
    """Return a ``Floor`` for each search with a cell without a limit, even if it found no floor. It is
    of the kind ``Aim.ENDS`` only if no floor of the kind ``Aim.SURVIVES`` was found.
    """
    found = []
    for ours in grouped(results, lambda one: searched(one.cell).series).values():
        searches = [Search(ours[0].cell, ours, aim) for aim in Aim]
        if searches[0].unlimited:
            survived, ended = map(_floor, searches)
            found.append(ended if survived.bytes is None and ended.bytes else survived)
    return found


def _floor(search: Search) -> Floor:
    cell, ours, limit, failing = search.cell, search.results, search.working_bytes, search.failing_bytes  # fmt: skip
    lives = {each: typical(same, search.judgements) for each, same in search.by_limit.items()}
    floor = Floor(
        cell=cell,
        cells=len(ours),
        aim=search.aim,
        model_bytes=next((result.model_bytes for result in ours if result.model_bytes), None),
        import_bytes=middle(result.import_bytes for result in ours),
        unlimited=lives[None],
    )
    if search.stop:
        return replace(floor, message=search.stop)
    if limit is None:
        fails = f"fails even under {format_bytes(failing)}" if failing else "not searched"
        return replace(floor, message=fails)
    if failing is None:
        return replace(floor, message=f"works even under {format_bytes(limit)}")
    is_wide = limit - failing > max(finest_step(cell), int(limit * COARSEST))
    if is_wide or search.passed < PASSES:
        between = f"above {format_bytes(failing)}, at most {format_bytes(limit)}"
        return replace(floor, message=f"{between}: the search is not finished")
    return replace(
        floor,
        bytes=limit,
        step_bytes=limit - failing,
        below=", ".join(dict.fromkeys(search.failed)),
        passed=search.passed,
        failed=len(search.failed),
        at_floor=lives[limit],
        with_room=lives.get(_with_room(limit)),
    )
