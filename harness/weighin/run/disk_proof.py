"""Test whether a disk that weighin slows down has the wanted speed, by a read with O_DIRECT."""

import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Final

from weighin import formats
from weighin.cell import Cell, Job, ModelSpec
from weighin.checkpoint import cache
from weighin.child_process import last_line
from weighin.disk.pace import Pace
from weighin.disk.passthrough import LARGEST_READ_BYTES
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Isolation, Streams
from weighin.probes import page_cache
from weighin.run import slow_disk
from weighin.run.slow_disk import SlowDisk
from weighin.units import MIB, format_seconds

RATE_TOLERANCE: Final = 0.05
LATENCY_TOLERANCE: Final = 0.1
PROBE: Final = Path(__file__).parents[1] / "disk" / "probe.py"
_MOST_BYTES: Final = 256 * MIB
_LONGEST_S: Final = 2.0
_BURST_S: Final = 0.3  # of reads before the timing, because the kernel's throttle starts late
_REQUESTS: Final = 30
_THREADS: Final = 4
_MOST_THREADS: Final = 128
_PATIENCE_S: Final = 60.0
_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """The measured speed of a direct read, to compare with the rate and the latency of ``pace``.

    ``bytes_per_s`` is None if ``pace`` sets no rate; ``latency_ns`` is None if it sets no latency.
    """

    pace: Pace
    bytes_per_s: float | None
    latency_ns: int | None
    through: str

    @property
    def holds(self) -> bool:
        """Whether the rate is within 5 % and the latency within 10 % of ``pace``."""
        return _is_near(self.bytes_per_s, self.pace.bytes_per_s, RATE_TOLERANCE) and _is_near(
            self.latency_ns, self.pace.latency_ns, LATENCY_TOLERANCE
        )

    def __str__(self) -> str:
        """Return the figures in words: "198.3 MB/s and 5.04 ms through FUSE"."""
        rate = f"{self.bytes_per_s / 1e6:.1f} MB/s" if self.bytes_per_s else ""
        latency = format_seconds(self.latency_ns) if self.latency_ns else ""
        return f"{' and '.join(filter(None, (rate, latency)))} through {self.through}"


def check(isolation: Isolation, jobs: Iterable[Job]) -> None:
    """Test whether this machine can provide every disk speed that the jobs ask for.

    Raises:
        IsolationUnavailable: a slow disk has another rate or latency than its cell asks for.
    """
    for job in {slow_disk.pace_of(job.cell): job for job in jobs}.values():
        for _ in range(_ATTEMPTS):  # other programs can only make a direct read slower
            proof = prove(isolation, job)
            if proof.holds:
                break
        else:
            raise IsolationUnavailable(
                f"this machine cannot provide a disk of {proof.pace}: direct reads (O_DIRECT)"
                f" measured {proof}",
                "stop other work on this machine, or give --disk a slower rate",
            )


def job_of(isolation: Isolation, model: ModelSpec, pace: Pace) -> Job:
    """Return a job that reads a model's pt checkpoint from a disk with the pace to test."""
    checkpoint = cache.ensure(model, "pt")
    cell = Cell(
        model,
        "probe",
        isolation.name,
        disk_bytes_per_s=pace.bytes_per_s,
        disk_latency_ns=pace.latency_ns,
    )
    return Job(cell, str(checkpoint.path), str(checkpoint.manifest_path), "")


def prove(isolation: Isolation, job: Job) -> Proof:
    """Read the checkpoint of a job with O_DIRECT on the job's slow disk, and return the speed.

    Raises:
        IsolationUnavailable: this machine cannot slow the disk down, or cannot read with O_DIRECT.
    """
    pace = slow_disk.pace_of(job.cell)
    page_cache.drop(formats.files(Path(job.checkpoint)))
    with slow_disk.under(job, isolation.name) as disk:
        figures = _figures(isolation, disk, pace)
    bytes_per_s, latency_ns = None, None
    if pace.bytes_per_s:
        bytes_per_s = figures["bytes"] * 1e9 / (figures["spent_ns"] - (pace.latency_ns or 0))
    if pace.latency_ns:  # a read of one page also takes the time of the page at the disk's rate
        page_ns = PAGESIZE / pace.bytes_per_s * 1e9 if pace.bytes_per_s else 0
        latency_ns = round(figures["latency_ns"] - page_ns)
    through = "FUSE" if disk.mount else "the kernel's throttle"
    return Proof(pace, bytes_per_s, latency_ns, through)


def _figures(isolation: Isolation, disk: SlowDisk, pace: Pace) -> dict[str, Any]:
    """Run ``weighin/disk/probe.py`` as a command in the isolation, and return its JSON output."""
    files = formats.files(Path(disk.job.checkpoint))
    largest = max(files, key=lambda file: file.stat().st_size)
    python = "python3" if isolation.name == "docker" else sys.executable
    command = (python, str(PROBE), str(largest), json.dumps(_options(pace)))
    cell = Cell.of_command(
        "probe", command, isolation.name, disk_bytes_per_s=disk.job.cell.disk_bytes_per_s
    )
    with (
        TemporaryDirectory() as folder,
        Path(os.devnull).open("rb") as nothing,
        TemporaryFile() as out,
        TemporaryFile() as err,
    ):
        Path(folder).chmod(0o755)
        streams = Streams(nothing.fileno(), out.fileno(), err.fileno())
        mounts = (str(PROBE), str(largest))
        running = isolation.start_command(cell, folder, streams, mounts, disk.job.throttled_device)
        try:
            has_ended = running.wait(_PATIENCE_S)
            code = running.reap().code if has_ended else None
        finally:
            disk.close()
            running.close()
        out.seek(0)
        err.seek(0)
        if code == 0:
            return dict(json.loads(out.read()))
        why = last_line(err.read()) or f"the read did not end in {_PATIENCE_S:.0f} s"
    raise IsolationUnavailable(
        f"a disk of {pace} could not be tested by direct reads (O_DIRECT): {why}",
        "put the checkpoint on a disk that allows direct reads: --storage FOLDER",
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


def _is_near(value: float | None, wanted: float | None, tolerance: float) -> bool:
    return wanted is None or (value is not None and abs(value / wanted - 1) <= tolerance)
