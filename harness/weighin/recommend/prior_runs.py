"""Read from earlier runs what this machine measured for one model and device."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from weighin.cell import Cell
from weighin.errors import RecordError
from weighin.probes import environment
from weighin.records import run_folder
from weighin.records.machine import CONCURRENT
from weighin.records.metrics import middle, use_needed_bytes
from weighin.records.verdict import height
from weighin.result import Outcome, Result

_SAME_MACHINE: Final = ("machine", "cpu", "cpus", "ram_bytes")
_RECORDS: Final = f"*/{run_folder.RECORDS}"
_SAME_LOAD: Final = ("model", "device", "dtype", "cache", "ranks", "disk")


@dataclass(slots=True)
class Evidence:
    """What was measured of one strategy with one checkpoint format, by RAM limit (None: without one)."""

    ok_limits: list[int | None] = field(default_factory=list)
    killed_limits: list[int] = field(default_factory=list)
    # The sampled maximum of anonymous and shared memory over all loads that ended ok, with the use.
    anon_bytes: int | None = None
    cuda_reserved_bytes: int | None = None
    ready_s: dict[int | None, list[float]] = field(default_factory=dict)  # until all is read

    def take(self, result: Result, use: str = "") -> None:
        """Add a record; of one with another use than ``use``, add only the time of the load."""
        cell, peaks = result.cell, result.peaks
        if result.outcome is Outcome.OK and result.ready_ns is not None:
            self.ready_s.setdefault(cell.ram_limit_bytes, []).append(result.ready_ns / 1e9)
        if cell.use != use:
            return
        if result.outcome is Outcome.OOM_KILLED and cell.ram_limit_bytes is not None:
            self.killed_limits.append(cell.ram_limit_bytes)
        if result.outcome is not Outcome.OK:
            return
        self.ok_limits.append(cell.ram_limit_bytes)
        kept = peaks.unreclaimable_sampled_bytes or peaks.anon_sampled_bytes or 0
        if cell.use:
            kept = max(kept, use_needed_bytes(result))
        self.anon_bytes = max(self.anon_bytes or 0, kept) or None
        self.cuda_reserved_bytes = peaks.cuda_reserved_bytes

    def fits(self, limit_bytes: int) -> bool | None:
        """Return whether the strategy works under a RAM limit; None if no record tells this."""
        if any(limit is not None and limit <= limit_bytes for limit in self.ok_limits):
            return True
        if any(limit >= limit_bytes for limit in self.killed_limits):
            return False
        return None

    def median_ready_s(self, limit_bytes: int | None) -> float | None:
        """Return the median seconds of the loads under the next larger measured limit, or the largest."""
        return middle(self._ready_s_near(limit_bytes))

    def noise_s(self, limit_bytes: int | None) -> float | None:
        """Return the median absolute deviation of the times of ``median_ready_s``; None for fewer than two."""
        seconds = self._ready_s_near(limit_bytes)
        usual = statistics.median(seconds or [0])
        deviations = [abs(one - usual) for one in seconds]
        return statistics.median(deviations) if len(seconds) > 1 else None

    def _ready_s_near(self, limit_bytes: int | None) -> list[float]:
        tried = sorted(self.ready_s, key=height)
        larger = [one for one in tried if height(one) >= height(limit_bytes)]
        return self.ready_s[[*larger, *tried[-1:]][0]] if tried else []


def find(
    folder: Path, wanted: Cell, left_out: Callable[[str], None] = lambda _: None
) -> dict[tuple[str, str], Evidence]:
    """Return what this machine measured of loads like ``wanted``, by (strategy, format).

    Such a load has no options, environment variables or GPU memory limit, and no other cell ran at
    once. A record with another use counts only for the time of its load. ``left_out`` gets the reason
    why a run below a folder cannot be read; a folder that is itself such a run is a RecordError.
    """
    here = environment.machine()
    evidence: dict[tuple[str, str], Evidence] = {}
    for result in _results(folder, left_out):
        cell = result.cell
        same_machine = all(result.environment.get(key) == here[key] for key in _SAME_MACHINE)
        # The times of cells that ran at once are not comparable.
        same_machine &= CONCURRENT not in result.environment
        is_other = any(getattr(cell, name) != getattr(wanted, name) for name in _SAME_LOAD)
        same_load = not (is_other or cell.options or cell.environment)
        if same_machine and same_load and cell.operation == "load" and not cell.vram_limit_bytes:
            evidence.setdefault((cell.strategy, cell.format), Evidence()).take(result, wanted.use)
    return evidence


def _results(folder: Path, left_out: Callable[[str], None]) -> Iterator[Result]:
    is_run = (folder / run_folder.RECORDS).exists()
    for file in [folder / run_folder.RECORDS] if is_run else sorted(folder.glob(_RECORDS)):
        try:
            yield from run_folder.read(file.parent).results
        except RecordError as error:
            if is_run:
                raise
            left_out(error.message)
