"""A sweep over limits, for tests of verdicts, matrices and pictures."""

from __future__ import annotations

from typing import Any

from factories import ENVIRONMENT, MODEL_BYTES, make_cell

from weighin.result import SCHEMA, Cost, Faults, Memory, Outcome, Peaks, Phase, Pressure, Result
from weighin.units import GIB, MIB

SECOND = 1_000_000_000
LIMITS = (None, 16, 8, 4, 1)
SWEEP: dict[str, tuple[tuple[float, float] | None, ...]] = {
    "baseline": ((25, 0), (26, 0), None, None, None),
    "mmap_assign": ((5, 0), (5.2, 0), (6, 0), (9, 1.2), (41, 5.5)),
    "streaming": ((7, 0), (7.5, 0), (7, 0), None, None),
}
"""By strategy and limit: seconds until ready, and how much of the model was read again."""


def swept(
    strategy: str, limit_gib: int | None, lived: tuple[float, float] | None, **changes: Any
) -> Result:
    """One cell of a sweep: killed where it did not live; 2 s of its time is one forward pass."""
    limit = None if limit_gib is None else limit_gib * GIB
    cell = make_cell(strategy, ram_limit_bytes=limit, **changes)
    if lived is None:
        message = "killed by the kernel for lack of memory in phase 'read'"
        return Result(
            SCHEMA, cell, Outcome.OOM_KILLED, message, "read", MODEL_BYTES, oom_kills=1,
            environment=ENVIRONMENT,
        )  # fmt: skip
    seconds, again = lived
    pages = round(again * MODEL_BYTES / 4096)
    memory = Memory(300 * MIB, 200 * MIB, 100 * MIB, 0)
    reread = round(again * 100)
    one = Phase("forward", 0, 2 * SECOND, 300 * MIB, memory, 9, reread, None, pages // 2)
    return Result(
        SCHEMA, cell, Outcome.OK, model_bytes=MODEL_BYTES, baseline=memory,
        peaks=Peaks(rss_bytes=GIB, anon_sampled_bytes=GIB), phases=(one,) * cell.passes,
        ready_ns=round((seconds - 2 * cell.passes) * SECOND),
        faults=Faults(1, round(again * 1000), pages - cell.passes * (pages // 2)),
        pressure=Pressure(0, 0), cost=Cost(wall_ns=SECOND, first_use_ns=2 * SECOND * cell.passes),
        environment=ENVIRONMENT,
    )  # fmt: skip


def a_sweep() -> list[Result]:
    return [
        swept(strategy, limit, lived)
        for strategy, lives in SWEEP.items()
        for limit, lived in zip(LIMITS, lives, strict=True)
    ]
