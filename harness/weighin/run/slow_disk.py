"""Slow down the disk that a cell reads its checkpoint from.

The kernel's throttle can limit only the rate, and only on some machines. On the other machines, a
FUSE file system limits the rate. On all machines, only FUSE can add a latency.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell, Job
from weighin.checkpoint import cache
from weighin.disk import mount, throttle
from weighin.disk.mount import Mount
from weighin.disk.pace import Pace
from weighin.disk.passthrough import LARGEST_READ_BYTES
from weighin.errors import IsolationUnavailable
from weighin.formats.pretrained_folder import folder_of
from weighin.isolation import delegation
from weighin.units import format_seconds

_LONG_NS: Final = 500_000_000  # a read stalls if it exceeds the latency by this time


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """The disk from which one cell reads its checkpoint.

    Attributes:
        job: the cell's job, with the path at which its worker reads the checkpoint.
        means: what the record says about the throttle or FUSE; empty for a disk of full speed.
    """

    job: Job
    means: dict[str, Any]
    mount: Mount | None = None

    def stalled(self) -> str:
        """Describe one read that the disk leaves unanswered, by file and offset; empty if none."""
        reads = self.mount.waiting() if self.mount else []
        patience_ns = (self.job.cell.disk_latency_ns or 0) + _LONG_NS
        if reads and reads[0].waited_ns > patience_ns:
            first = reads[0]
            return (
                f"the read of {first.path} at offset {first.offset} has had no answer for"
                f" {format_seconds(first.waited_ns)}"
            )
        return ""

    def close(self) -> None:
        """Make all waiting reads fail, so that their processes can end, and unmount the disk.

        A second call has no effect.
        """
        if self.mount:
            self.mount.close()


@contextmanager
def under(job: Job, isolation: str, stall_from_bytes: int | None = None) -> Iterator[SlowDisk]:
    """Slow the disk of a job's checkpoint down until the end of the ``with`` block.

    A read behind the file offset ``stall_from_bytes`` gets no answer; None sets no such offset.

    Raises:
        IsolationUnavailable: this machine cannot slow the disk down.
    """
    pace = replace(pace_of(job.cell), stall_from_bytes=stall_from_bytes)
    checkpoint = Path(job.checkpoint)
    device = device_to_throttle(pace, checkpoint, isolation) if pace else ""
    if not pace or device:
        entry = {"disk": {"means": "throttle", "device": device}} if device else {}
        yield SlowDisk(replace(job, throttled_device=device), entry)
        return
    folder = folder_of(checkpoint)
    mounted = Mount(folder, pace, root())
    try:
        inside = replace(job, checkpoint=str(mounted.folder / checkpoint.relative_to(folder)))
        means = {"disk": {"means": "fuse", "request_bytes": LARGEST_READ_BYTES}}
        yield SlowDisk(inside, means, mounted)
    finally:
        mounted.close()


def pace_of(cell: Cell) -> Pace:
    return Pace(cell.disk_bytes_per_s, cell.disk_latency_ns)


def device_to_throttle(pace: Pace, checkpoint: Path, isolation: str) -> str:
    """Return the checkpoint's disk if the kernel's throttle can slow it down; empty if only FUSE can.

    Raises:
        IsolationUnavailable: neither the throttle nor FUSE can slow the disk down to ``pace`` here.
    """
    device, why = "", "the kernel's throttle limits the rate, but adds no latency"
    if pace.latency_ns is None and pace.stall_from_bytes is None:
        why = _without_throttle(isolation)
        if not why:
            device, why = throttle.device_of(checkpoint)
        if device:
            return device
    if obstacle := mount.obstacle(in_container=isolation == "docker"):
        message, repair = obstacle
        raise IsolationUnavailable(
            f"weighin can slow a disk down to {pace} only with FUSE, because {why}; FUSE does not"
            f" work here: {message}",
            repair,
        )
    return ""


def root() -> Path:
    """Return the folder in which the slow disks of all runs are mounted."""
    return cache.folder() / "disks"


def _without_throttle(isolation: str) -> str:
    """Return why the kernel cannot throttle the cells of an isolation; empty if it can."""
    if isolation == "docker":
        return ""
    if isolation != "cgroup":
        return f"--isolation {isolation} creates no cgroup that the kernel could throttle"
    hierarchy = throttle.hierarchy()
    if hierarchy is None:
        return "this machine has no cgroup controller that limits reads (blkio or io)"
    version, place = hierarchy
    if version == 1:
        return "" if os.access(place, os.W_OK) else f"this user may not create cgroups in {place}"
    groups = delegation.groups_root()
    controllers = (groups / "cgroup.controllers").read_text().split() if groups else []
    return "" if "io" in controllers else f"{groups} lacks the cgroup controller io"
