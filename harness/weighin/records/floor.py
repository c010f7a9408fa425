"""Compute RAM floors: the smallest RAM limit under which a load or command survives, or just ends.

The input is only the results of cells (measurements) that ``weighin.records.bisection`` chose. A
limit *works* if every cell under the limit ended ok. A limit *fails* if, in a cell under the limit,
the kernel killed a process for lack of memory, or the cell timed out. A search goes on only if the
cell without a limit ended ok, so in time.

There are two kinds of floors (``Aim``). For a floor that a load *survives*, a limit also fails if a
cell thrashes under the limit (``weighin.records.verdict``). For a floor under which a load *ends*,
a cell that thrashes but ends ok does not prevent the limit from working.

The floor is the smallest working limit above all failing limits. The floor is confirmed if
``PASSES`` cells end ok under it, and a cell fails under a limit that is smaller by at most
``COARSEST`` of the floor, or by at most ``finest_step``. A cell that fails for a reason other than
memory ends the search without a floor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from weighin.cell import Cell
from weighin.records.repeats import grouped, middle
from weighin.records.verdict import Judgement, Verdict, judge_result, used_ns
from weighin.result import Outcome, Result
from weighin.units import MIB, format_bytes, format_exact

PASSES: Final = 3
_FINEST_STEP_BYTES: Final = 8 * MIB
_FINEST_STEP_OF_COMMANDS: Final = MIB
COARSEST: Final = 0.10
"""A reported floor exceeds the largest failing limit by this share at most, or ``finest_step``."""
ROOM: Final = 1.1
"""A search also measures a cell under ``ROOM`` times the floor, to show how long it takes there."""
_FAILING: Final = (Outcome.OOM_KILLED, Outcome.CHILD_KILLED, Outcome.TIMEOUT)
_BOUNDING: Final = (*_FAILING, Outcome.THRASHING)
KILLED: Final = "killed"


class Aim(StrEnum):
    """The two kinds of floors: the load survives (does not thrash), or the load only ends."""

    SURVIVES = "survives"
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Bracket:
    """The bounds of a RAM floor: it is above ``failing_bytes``, and not above ``working_bytes``."""

    failing_bytes: int | None
    working_bytes: int | None
    passed: int = 0
    """The number of cells that ended ok under ``working_bytes``."""

    @property
    def step_bytes(self) -> int | None:
        if self.failing_bytes is None or self.working_bytes is None:
            return None
        return self.working_bytes - self.failing_bytes


@dataclass(frozen=True, slots=True)
class Life:
    """The time until ready and the verdict of the typical cell under one limit (``_life``)."""

    limit_bytes: int | None
    ready_ns: int | None
    judgement: Judgement | None
    times: float | None = None
    """The cell's time until the end of its use, as a multiple of that time without a limit."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The RAM floor of a load or command; without one, ``bytes`` is None and ``message`` says why.

    Attributes:
        cell: the cell (measurement) whose floor was searched; it has no limit.
        aim: whether the load survives under the floor, or only ends (and may thrash).
        step_bytes: the floor minus the largest failing limit.
        below: how cells failed under that failing limit: "killed", "thrashes", "timed out after
            300 s".
        import_bytes: the median anonymous and shared memory before the load, summed over the ranks.
        cells: the number of measured cells, including the cell under ``ROOM`` times the floor.
    """

    cell: Cell
    bytes: int | None
    message: str = ""
    step_bytes: int | None = None
    below: str = ""
    passed: int = 0
    failed: int = 0
    model_bytes: int | None = None
    import_bytes: int | None = None
    unlimited: Life | None = None
    at_floor: Life | None = None
    with_room: Life | None = None
    cells: int = 0
    aim: Aim = Aim.SURVIVES

    @property
    def per_model(self) -> float | None:
        """The floor divided by the model's size."""
        return self.bytes / self.model_bytes if self.bytes and self.model_bytes else None

    @property
    def above_import_per_model(self) -> float | None:
        """The floor minus ``import_bytes``, divided by the model's size; None if one is unknown."""
        if self.bytes is None or self.import_bytes is None or not self.model_bytes:
            return None
        return (self.bytes - self.import_bytes) / self.model_bytes


def finest_step(cell: Cell) -> int:
    """Return the smallest step between the limits to try, in bytes.

    The step is smaller for a command, because a command may need little memory.
    """
    return _FINEST_STEP_OF_COMMANDS if cell.operation == "command" else _FINEST_STEP_BYTES


def searched(cell: Cell) -> Cell:
    """Remove the limit and repeat number of a cell; cells that are then equal share one floor."""
    return replace(cell, ram_limit_bytes=None, repeat=0)


def bracket(results: Sequence[Result], aim: Aim) -> Bracket:
    """Return the bounds of the RAM floor of the kind ``aim``, from all results of its search."""
    by_limit: dict[int, list[bool | None]] = {}
    for result in results:
        if (limit := result.cell.ram_limit_bytes) is not None:
            by_limit.setdefault(limit, []).append(_works(result, results, aim))
    failing = max((limit for limit, works in by_limit.items() if False in works), default=None)
    above = [
        limit
        for limit, works in by_limit.items()
        if {*works} == {True} and (failing is None or limit > failing)
    ]
    working = min(above, default=None)
    return Bracket(failing, working, 0 if working is None else len(by_limit[working]))


def _works(result: Result, ours: Sequence[Result], aim: Aim) -> bool | None:
    """Return True if a result shows that its limit works, False if it fails; None if neither.

    A cell that weighin killed because it thrashed shows nothing for ``Aim.ENDS``: without the kill,
    the cell might have ended.
    """
    if result.outcome in _FAILING:
        return False
    if result.outcome is Outcome.THRASHING:
        return False if aim is Aim.SURVIVES else None
    if result.outcome is not Outcome.OK:
        return None
    judgement = judge_result(result, _unlimited_ns(ours))
    return aim is Aim.ENDS or judgement is None or judgement.verdict is not Verdict.THRASHES


def _unlimited_ns(ours: Sequence[Result]) -> int | None:
    first = unlimited_of(ours)
    return used_ns(first) if first else None


def stopped_by(ours: Iterable[Result]) -> Result | None:
    """Return the first result that ends the search without a floor; None if there is none.

    Without a limit, any result that is not ok ends the search. Under a limit, any such result ends
    the search unless the cell was killed for lack of memory, timed out or thrashed.
    """
    for result in ours:
        bounding = () if result.cell.ram_limit_bytes is None else _BOUNDING
        if result.outcome not in (Outcome.OK, *bounding):
            return result
    return None


def why_stopped(result: Result) -> str:
    """Describe the result that ended a search: its outcome, limit and message."""
    if result.outcome is Outcome.MEASUREMENT_FAILED:
        return f"could not be measured: {result.message}"
    limit = result.cell.ram_limit_bytes
    where = "without a limit" if limit is None else f"under {format_exact(limit)}"
    return f"{result.outcome} {where}" + (f": {result.message}" if result.message else "")


def with_room(floor_bytes: int) -> int:
    """Return ``ROOM`` times a floor, in bytes, rounded to whole MiB."""
    return round(floor_bytes * ROOM / MIB) * MIB


def floors(results: Iterable[Result]) -> list[Floor]:
    """Return a ``Floor`` for each search with a cell without a limit, even if it found no floor.

    A working limit far above the highest failing limit is not a floor: the two limits must differ
    by at most ``COARSEST`` of the working limit, or by at most ``finest_step``. The floor is of the
    kind ``Aim.ENDS``, as in a search with --thrashing, only if no floor of the kind
    ``Aim.SURVIVES`` was found.
    """
    groups = grouped(results, lambda one: searched(one.cell).series)
    return [_either(ours) for ours in groups.values() if unlimited_of(ours)]


def _either(ours: list[Result]) -> Floor:
    cell = searched(ours[0].cell)
    survived = _floor(cell, ours, Aim.SURVIVES)
    if survived.bytes is not None:
        return survived
    ended = _floor(cell, ours, Aim.ENDS)
    return survived if ended.bytes is None else ended


def _floor(cell: Cell, ours: list[Result], aim: Aim) -> Floor:
    bounds = bracket(ours, aim)
    limit, failing = bounds.working_bytes, bounds.failing_bytes
    failed = [
        result
        for result in ours
        if result.cell.ram_limit_bytes == failing and _works(result, ours, aim) is False
    ]
    message = _trouble(ours, bounds)
    baselines = [
        (result.baseline.anon_bytes + result.baseline.shmem_bytes) * cell.ranks
        for result in ours
        if result.baseline
    ]
    floor = Floor(
        cell=cell,
        bytes=None,
        message=message,
        model_bytes=next((result.model_bytes for result in ours if result.model_bytes), None),
        import_bytes=middle(baselines),
        unlimited=_life(None, ours, None),
        cells=len(ours),
        aim=aim,
    )
    if message or limit is None:
        return floor
    unlimited_ns = _unlimited_ns(ours)
    return replace(
        floor,
        bytes=limit,
        step_bytes=bounds.step_bytes,
        below=", ".join(dict.fromkeys(map(_how, failed))),
        passed=bounds.passed,
        failed=len(failed),
        at_floor=_life(limit, ours, unlimited_ns),
        with_room=_life(with_room(limit), ours, unlimited_ns),
    )


def _trouble(ours: Sequence[Result], bounds: Bracket) -> str:
    """Return the reason why there is no floor; empty if the floor is confirmed."""
    limit, failing = bounds.working_bytes, bounds.failing_bytes
    if stop := stopped_by(ours):
        return why_stopped(stop)
    if limit is None or failing is None:
        if limit:
            return f"works even under {format_bytes(limit)}"
        return f"fails even under {format_bytes(failing)}" if failing else "not searched"
    is_wide = limit - failing > max(finest_step(ours[0].cell), int(limit * COARSEST))
    if is_wide or bounds.passed < PASSES:
        between = f"above {format_bytes(failing)}, at most {format_bytes(limit)}"
        return f"{between}: the search is not finished"
    return ""


def _how(result: Result) -> str:
    """Return how a cell failed under its limit: it was killed, thrashed or timed out."""
    if result.outcome in (Outcome.OOM_KILLED, Outcome.CHILD_KILLED):
        return KILLED
    if result.outcome is not Outcome.TIMEOUT:
        return Verdict.THRASHES.value
    allowed_s = result.stopped.timeout_s if result.stopped else None
    return f"timed out after {allowed_s:g} s" if allowed_s else "timed out"


def _life(limit: int | None, ours: Sequence[Result], unlimited_ns: int | None) -> Life | None:
    """Return the time and verdict of the typical cell under ``limit``; None without a cell there.

    Among the cells that ended ok, it has the median time; if none ended ok, it is the first cell.
    """
    cells = [result for result in ours if result.cell.ram_limit_bytes == limit]
    if not cells:
        return None
    ok = [result for result in cells if result.outcome is Outcome.OK]
    typical_ns = middle(map(used_ns, ok))
    chosen = next((result for result in ok if used_ns(result) == typical_ns), cells[0])
    spent_ns = used_ns(chosen) if chosen.outcome is Outcome.OK else None
    return Life(
        limit,
        chosen.ready_ns,
        judge_result(chosen, unlimited_ns),
        spent_ns / unlimited_ns if spent_ns and unlimited_ns else None,
    )


def results_of(cell: Cell, results: Iterable[Result]) -> list[Result]:
    """Return the results of the search for the floor of ``cell``, which comes from ``searched``."""
    return [result for result in results if searched(result.cell) == cell]


def unlimited_of(results: Sequence[Result]) -> Result | None:
    """Return the first result without a RAM limit; None if there is none."""
    return next((result for result in results if result.cell.ram_limit_bytes is None), None)
