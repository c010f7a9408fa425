"""The RAM floor of a way of loading: the smallest limit under which it ends ok.

Computed from results alone; ``weighin.run.bisection`` says which ones are wanted. A limit *works* where
every cell under it ended ok, and *fails* where one ran out of memory: it was killed, or did not end
in the time allowed, as it did without a limit. The floor is the smallest limit that works above all
that fail; it is confirmed by ``PASSES`` cells that end ok, and by a cell that fails one step below.
A cell that fails for another reason than memory ends the search: there is no floor.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final

from weighin.cell import Cell
from weighin.record import Outcome, Result
from weighin.records.verdict import Judgement, judge_result, used_ns
from weighin.units import MIB, format_bytes, format_exact

PASSES: Final = 3
FINEST_STEP_BYTES: Final = 8 * MIB
COARSEST: Final = 0.10
"""The largest ``within``: what is known less well is no floor."""
ROOM: Final = 1.1
"""How far above the floor one more cell is measured: what life costs with some room."""
_BOUNDING: Final = (Outcome.OOM_KILLED, Outcome.TIMEOUT)
KILLED: Final = "killed"
_TIME_ALLOWED: Final = re.compile(r"after (\d[\d.]* s)\b")


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known of a floor: it is above ``failing_bytes``, and not above ``working_bytes``."""

    failing_bytes: int | None
    working_bytes: int | None
    passed: int = 0
    """How many cells ended ok under ``working_bytes``."""

    @property
    def step_bytes(self) -> int | None:
        if self.failing_bytes is None or self.working_bytes is None:
            return None
        return self.working_bytes - self.failing_bytes


@dataclass(frozen=True, slots=True)
class Life:
    """How a strategy lived at one limit: its median time until ready, and the verdict on it."""

    limit_bytes: int | None
    ready_ns: int | None
    judgement: Judgement | None


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one series. ``bytes`` is None where none was found; ``message`` says why.

    Attributes:
        cell: what was searched, as it is without a limit.
        step_bytes: how far below the floor a cell failed.
        below: how it failed there: "killed", "timed out after 300 s".
        import_bytes: anonymous and shared memory after ``import torch``: file pages can be dropped.
        cells: how many cells it took, the one at ``ROOM`` included.
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

    @property
    def per_model(self) -> float | None:
        """The floor over the model's size."""
        return self.bytes / self.model_bytes if self.bytes and self.model_bytes else None

    @property
    def above_import_per_model(self) -> float | None:
        """The same, less what a bare import holds."""
        if self.bytes is None or self.import_bytes is None or not self.model_bytes:
            return None
        return (self.bytes - self.import_bytes) / self.model_bytes


def searched(cell: Cell) -> Cell:
    """Return a cell without limit and repeat: what one floor is of."""
    return replace(cell, ram_limit_bytes=None, repeat=0)


def bracket(results: Iterable[Result]) -> Bracket:
    """Return what the results of one series say of its floor."""
    by_limit: dict[int, list[Outcome]] = {}
    for result in results:
        if (limit := result.cell.ram_limit_bytes) is not None:
            by_limit.setdefault(limit, []).append(result.outcome)
    failing = max(
        (limit for limit, outcomes in by_limit.items() if {*outcomes} & {*_BOUNDING}), default=None
    )
    above = [
        limit
        for limit, outcomes in by_limit.items()
        if {*outcomes} == {Outcome.OK} and (failing is None or limit > failing)
    ]
    working = min(above, default=None)
    return Bracket(failing, working, 0 if working is None else len(by_limit[working]))


def stopped_by(ours: Iterable[Result]) -> Result | None:
    """Return the result of one series that says nothing of memory, and so ends the search.

    Without a limit that is one that is not ok; under a limit, one that neither was killed for lack
    of memory nor ran out of time, such as one that loaded wrong weights.
    """
    for one in ours:
        bounding = () if one.cell.ram_limit_bytes is None else _BOUNDING
        if one.outcome not in (Outcome.OK, *bounding):
            return one
    return None


def why_stopped(result: Result) -> str:
    """Return in words what ended a search: the outcome, under which limit, and its message."""
    if result.outcome is Outcome.MEASUREMENT_FAILED:
        return f"could not be measured: {result.message}"
    limit = result.cell.ram_limit_bytes
    where = "without a limit" if limit is None else f"under {format_exact(limit)}"
    return f"{result.outcome} {where}" + (f": {result.message}" if result.message else "")


def with_room(floor_bytes: int) -> int:
    """Return the limit somewhat above a floor, in whole MiB."""
    return round(floor_bytes * ROOM / MIB) * MIB


def floors(results: Iterable[Result]) -> list[Floor]:
    """Return the floor of every series that was measured without a limit, found or not.

    A limit that works far above one that fails, as in a sweep, is no floor: their distance must be
    at most ``COARSEST`` of it, or ``FINEST_STEP_BYTES``.
    """
    measured = list(results)
    cells: list[Cell] = []
    for one in measured:
        if (cell := searched(one.cell)) not in cells:
            cells.append(cell)
    series = [(cell, results_of(cell, measured)) for cell in cells]
    return [_floor(cell, ours) for cell, ours in series if unlimited_of(ours)]


def _floor(cell: Cell, ours: list[Result]) -> Floor:
    known, first = bracket(ours), unlimited_of(ours)
    limit, failing = known.working_bytes, known.failing_bytes
    failed = [
        one for one in ours if one.cell.ram_limit_bytes == failing and one.outcome in _BOUNDING
    ]
    message = _trouble(ours, known)
    baselines = [one.baseline.anon_bytes + one.baseline.shmem_bytes for one in ours if one.baseline]
    floor = Floor(
        cell=cell,
        bytes=None,
        message=message,
        model_bytes=next((one.model_bytes for one in ours if one.model_bytes), None),
        import_bytes=median_low(baselines) if baselines else None,
        unlimited=_life(None, ours, None),
        cells=len(ours),
    )
    if message or limit is None:
        return floor
    peace_ns = used_ns(first) if first else None
    return replace(
        floor,
        bytes=limit,
        step_bytes=known.step_bytes,
        below=", ".join(dict.fromkeys(map(_how, failed))),
        passed=known.passed,
        failed=len(failed),
        at_floor=_life(limit, ours, peace_ns),
        with_room=_life(with_room(limit), ours, peace_ns),
    )


def _trouble(ours: Sequence[Result], known: Bracket) -> str:
    """Return why there is no floor; empty where there is one, confirmed."""
    limit, failing = known.working_bytes, known.failing_bytes
    if stop := stopped_by(ours):
        return why_stopped(stop)
    if limit is None or failing is None:
        known_ends = [f"works even under {format_bytes(limit)}"] if limit else []
        known_ends += [f"fails even under {format_bytes(failing)}"] if failing else []
        return known_ends[0] if known_ends else "not searched"
    is_wide = limit - failing > max(FINEST_STEP_BYTES, int(limit * COARSEST))
    if is_wide or known.passed < PASSES:
        between = f"above {format_bytes(failing)}, not above {format_bytes(limit)}"
        return f"{between}: not searched to its end"
    return ""


def _how(result: Result) -> str:
    """Return how a cell ran out of memory."""
    if result.outcome is Outcome.OOM_KILLED:
        return KILLED
    allowed = _TIME_ALLOWED.search(result.message)
    return f"timed out after {allowed[1]}" if allowed else "timed out"


def _life(limit: int | None, ours: Sequence[Result], peace_ns: int | None) -> Life | None:
    """Return the life under one limit: the cell of median time stands for all that ended ok."""
    cells = [one for one in ours if one.cell.ram_limit_bytes == limit]
    if not cells:
        return None
    ok = sorted(
        (one for one in cells if one.outcome is Outcome.OK), key=lambda one: used_ns(one) or 0
    )
    chosen = ok[(len(ok) - 1) // 2] if ok else cells[0]
    return Life(limit, chosen.ready_ns, judge_result(chosen, peace_ns))


def results_of(cell: Cell, results: Iterable[Result]) -> list[Result]:
    """Return the results that say something of the floor of ``cell``."""
    return [one for one in results if searched(one.cell) == cell]


def unlimited_of(results: Sequence[Result]) -> Result | None:
    """Return the result without a limit."""
    return next((one for one in results if one.cell.ram_limit_bytes is None), None)
