"""Find the files that a command left in a tmpfs, where they take memory until they are removed."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from weighin.probes import mounts
from weighin.result import Sample
from weighin.text import few, one_line
from weighin.units import MIB, format_bytes

_BLOCK_BYTES: Final = 512
_CLOCK_S: Final = 0.02  # the kernel's clock for files is a little behind


def left(started_s: float, last: Sample | None) -> str:
    """Say which files that changed since ``started_s`` take memory; empty below 1 MiB.

    ``last`` is the cgroup's sample after the end of all processes, with the shared memory that they
    left; None without a cgroup, when a file may be another program's.
    """
    total = last.shmem_bytes if last else None
    if total is not None and total < MIB:
        return ""
    files = sorted(_files(started_s - _CLOCK_S), key=lambda file: -file[1])
    found = sum(size for _, size in files)
    if max(found, total or 0) < MIB:
        return ""
    named = few([f"{one_line(path)} ({format_bytes(size)})" for path, size in files])
    if total is None:
        return (
            f"files in a tmpfs that changed meanwhile take memory until they are removed: {named}"
        )
    of = f": {named}" if named else ", in no file that is visible here"
    return f"the command left {format_bytes(total)} of shared memory or files in a tmpfs{of}"


def _files(since_s: float) -> Iterator[tuple[str, int]]:
    """Yield the path and the size in memory of each file in a tmpfs that changed since then."""
    seen = set()
    for mount in mounts.read():
        if mount.kind not in ("tmpfs", "ramfs") or mount.place.is_relative_to("/sys"):
            continue
        for folder, below, names in os.walk(mount.place):
            below[:] = [name for name in below if not os.path.ismount(Path(folder, name))]
            for name in names:
                path = Path(folder, name)
                try:
                    state = path.lstat()
                except OSError:  # removed meanwhile
                    continue
                key = (state.st_dev, state.st_ino)
                if stat.S_ISREG(state.st_mode) and state.st_ctime >= since_s and key not in seen:
                    seen.add(key)
                    yield str(path), state.st_blocks * _BLOCK_BYTES
