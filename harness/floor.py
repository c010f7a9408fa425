"""The RAM floor of a way of loading: the smallest limit under which it ends ok.

Computed from results alone; ``harness.bisection`` says which ones are wanted. A limit *works* where every cell under it ended ok, and *fails* where
one did not. The floor is the smallest limit that works above all that fail; it is confirmed by
``PASSES`` cells that end ok, and by a cell that fails one step below.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Final

from harness.cell import Cell
from harness.record import Outcome, Result
from harness.units import MIB, format_bytes
from harness.verdict import Judgement, judge, used_ns

PASSES: Final = 3
FINEST_STEP_BYTES: Final = 8 * MIB
COARSEST: Final = 0.10
"""The largest ``within``: what is known less well is no floor."""
ROOM: Final = 1.1
"""How far above the floor one more cell is measured: what life costs with some room."""


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
        import_bytes: anonymous and shared memory after ``import torch``: file pages can be dropped.
        cells: how many cells it took, the one at ``ROOM`` included.
    """

    cell: Cell
    bytes: int | None
    message: str = ""
    step_bytes: int | None = None
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
    by_limit: dict[int, list[bool]] = {}
    for result in results:
        if (limit := result.cell.ram_limit_bytes) is not None:
            by_limit.setdefault(limit, []).append(result.outcome is Outcome.OK)
    failing = max((limit for limit, oks in by_limit.items() if not all(oks)), default=None)
    above = [limit for limit in by_limit if failing is None or limit > failing]
    working = min(above, default=None)
    return Bracket(failing, working, 0 if working is None else len(by_limit[working]))


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


def as_dict(floor: Floor) -> dict[str, Any]:
    """Return a floor for programs: bytes and nanoseconds, None where something was not found."""
    cell = floor.cell
    lives = {"unlimited": floor.unlimited, "at_floor": floor.at_floor, "with_room": floor.with_room}
    return {
        "strategy": cell.strategy,
        "model": cell.model.title,
        "isolation": cell.isolation,
        "device": cell.device,
        "dtype": cell.dtype,
        "format": cell.format,
        "options": cell.options,
        "floor_bytes": floor.bytes,
        "message": floor.message,
        "step_bytes": floor.step_bytes,
        "passed": floor.passed,
        "failed": floor.failed,
        "model_bytes": floor.model_bytes,
        "import_bytes": floor.import_bytes,
        "floor_per_model": floor.per_model,
        "above_import_per_model": floor.above_import_per_model,
        "cells": floor.cells,
    } | {name: _life_as_dict(life) for name, life in lives.items()}


def _life_as_dict(life: Life | None) -> dict[str, Any] | None:
    if life is None:
        return None
    said = life.judgement
    return {
        "limit_bytes": life.limit_bytes,
        "ready_ns": life.ready_ns,
        "verdict": said.verdict.value if said else None,
        "reason": said.reason if said else "",
    }


def _floor(cell: Cell, ours: list[Result]) -> Floor:
    known, first = bracket(ours), unlimited_of(ours)
    limit, failing = known.working_bytes, known.failing_bytes
    failed = [
        one for one in ours if one.cell.ram_limit_bytes == failing and one.outcome is not Outcome.OK
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
        passed=known.passed,
        failed=len(failed),
        at_floor=_life(limit, ours, peace_ns),
        with_room=_life(with_room(limit), ours, peace_ns),
    )


def _trouble(ours: Sequence[Result], known: Bracket) -> str:
    """Return why there is no floor; empty where there is one, confirmed."""
    first, limit, failing = unlimited_of(ours), known.working_bytes, known.failing_bytes
    lost = next((one for one in ours if one.outcome is Outcome.MEASUREMENT_FAILED), None)
    if lost:
        return f"could not be measured: {lost.message}"
    if first and first.outcome is not Outcome.OK:
        return f"{first.outcome} without a limit" + (f": {first.message}" if first.message else "")
    if limit is None or failing is None:
        known_ends = [f"works even under {format_bytes(limit)}"] if limit else []
        known_ends += [f"fails even under {format_bytes(failing)}"] if failing else []
        return known_ends[0] if known_ends else "not searched"
    is_wide = limit - failing > max(FINEST_STEP_BYTES, int(limit * COARSEST))
    if is_wide or known.passed < PASSES:
        between = f"above {format_bytes(failing)}, not above {format_bytes(limit)}"
        return f"{between}: not searched to its end"
    return ""


def _life(limit: int | None, ours: Sequence[Result], peace_ns: int | None) -> Life | None:
    """Return the life under one limit: the cell of median time stands for all that ended ok."""
    cells = [one for one in ours if one.cell.ram_limit_bytes == limit]
    if not cells:
        return None
    ok = sorted(
        (one for one in cells if one.outcome is Outcome.OK), key=lambda one: used_ns(one) or 0
    )
    chosen = ok[(len(ok) - 1) // 2] if ok else cells[0]
    return Life(limit, chosen.ready_ns, judge(chosen, peace_ns))


def results_of(cell: Cell, results: Iterable[Result]) -> list[Result]:
    """Return the results that say something of the floor of ``cell``."""
    return [one for one in results if searched(one.cell) == cell]


def unlimited_of(results: Sequence[Result]) -> Result | None:
    """Return the result without a limit."""
    return next((one for one in results if one.cell.ram_limit_bytes is None), None)
