"""Prove that this machine holds the pace of a disk: read directly, under the isolation of the cells."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from weighin import formats
from weighin.cell import Cell, Job
from weighin.disk.pace import Pace
from weighin.disk.passthrough import LARGEST_READ_BYTES
from weighin.errors import IsolationUnavailable
from weighin.record import Result
from weighin.run.cell_runner import Setting, measure
from weighin.run.slow_disk import pace_of
from weighin.units import MIB, format_seconds

RATE_TOLERANCE: Final = 0.05
LATENCY_TOLERANCE: Final = 0.1
PROBE: Final = Path(__file__).parents[1] / "disk" / "probe.py"
_MOST_BYTES: Final = 256 * MIB
_LONGEST_S: Final = 2.0
_BURST_S: Final = 0.3  # the kernel's throttle lets a part of a second pass at once, before it holds
_REQUESTS: Final = 30
_MOST_THREADS: Final = 128
_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Proof:
    """What a direct read of the disk gave; None for what was not asked for."""

    pace: Pace
    bytes_per_s: float | None
    latency_ns: int | None
    means: str

    @property
    def holds(self) -> bool:
        """Whether the rate is within 5 % of the one that was asked for, and the latency within 10 %."""
        return _is_near(self.bytes_per_s, self.pace.bytes_per_s, RATE_TOLERANCE) and _is_near(
            self.latency_ns, self.pace.latency_ns, LATENCY_TOLERANCE
        )

    def __str__(self) -> str:
        """Return the figures in words: "198.3 MB/s and 5.04 ms through FUSE"."""
        rate = f"{self.bytes_per_s / 1e6:.1f} MB/s" if self.bytes_per_s else ""
        latency = format_seconds(self.latency_ns) if self.latency_ns else ""
        through = "FUSE" if self.means == "fuse" else "the kernel's throttle"
        return f"{' and '.join(filter(None, (rate, latency)))} through {through}"


def check(setting: Setting, jobs: Iterable[Job]) -> None:
    """Measure the pace of each slow disk of these jobs once.

    Raises:
        IsolationUnavailable: this machine does not hold one of them.
    """
    first = {pace: job for job in reversed(list(jobs)) if (pace := pace_of(job.cell))}
    for pace, job in first.items():
        proof = prove(setting, job)
        if not proof.holds:
            raise IsolationUnavailable(
                f"this machine does not hold a disk of {pace}: a direct read got {proof}",
                "stop other work on this machine, or ask for a slower disk",
            )


def prove(setting: Setting, job: Job) -> Proof:
    """Read the checkpoint of a job directly, as the job's cell would, and return the pace.

    Raises:
        IsolationUnavailable: this machine cannot slow the disk down, or read it directly.
    """
    pace = pace_of(job.cell)
    options = _options(pace)
    with TemporaryDirectory() as folder:
        (Path(folder) / "samples").mkdir()
        result = measure(
            replace(setting, run=Path(folder), steady=False),
            replace(job, cell=_cell(job.cell, options), strategy_path=str(PROBE), trace=False),
            formats.files(Path(job.checkpoint)),
            None,
        )
    rate_ns = _phase_ns(result, "rate")
    if rate_ns is None:
        raise IsolationUnavailable(
            f"a disk of {pace} could not be tested by a direct read: {result.message}",
            "put the checkpoint on a disk that allows direct reads: --storage FOLDER",
        )
    sent_ns = rate_ns - (pace.latency_ns or 0)
    latency_ns = _phase_ns(result, "latency")
    return Proof(
        pace,
        options["bytes"] * 1e9 / sent_ns if pace.bytes_per_s else None,
        _latency_ns(pace, latency_ns) if pace.latency_ns and latency_ns else None,
        result.environment["disk"]["means"],
    )


def _options(pace: Pace) -> dict[str, int]:
    rate, latency_ns = pace.bytes_per_s or 0, pace.latency_ns or 0
    in_flight = math.ceil(2 * rate * latency_ns / 1e9 / LARGEST_READ_BYTES)
    return {
        "bytes": min(_MOST_BYTES, round(rate * _LONGEST_S)),
        "before": round(rate * _BURST_S),
        "threads": min(_MOST_THREADS, max(_THREADS, in_flight)),
        "requests": _REQUESTS if latency_ns else 0,
    }


def _cell(cell: Cell, options: dict[str, int]) -> Cell:
    """Return the cell of the probe, on the disk of ``cell``, without its limits."""
    return Cell(
        cell.model,
        PROBE.stem,
        cell.isolation,
        options=dict(options),
        passes=0,
        disk_bytes_per_s=cell.disk_bytes_per_s,
        disk_latency_ns=cell.disk_latency_ns,
    )


def _latency_ns(pace: Pace, phase_ns: int) -> int:
    """Return the time of one small read without the time of its bytes."""
    sent_ns = PAGESIZE / pace.bytes_per_s * 1e9 if pace.bytes_per_s else 0.0
    return round(phase_ns / _REQUESTS - sent_ns)


def _phase_ns(result: Result, name: str) -> int | None:
    found = (phase.end_ns - phase.start_ns for phase in result.phases if phase.name == name)
    return next(found, None)


def _is_near(value: float | None, wanted: float | None, tolerance: float) -> bool:
    return wanted is None or (value is not None and abs(value / wanted - 1) <= tolerance)
