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

_CLOCK_S: Final = 0.02  # the kernel's clock for files is a little behind


def left(started_s: float, last: Sample | None) -> str:
    """Say which files that changed since ``started_s`` take memory; empty below 1 MiB.

    ``last`` is the cgroup's sample after the end of all processes, with the shared memory that they
    left. Without it (and a cgroup), a file may be another program's.
    """
    if last and last.shmem_bytes <= MIB:
        return ""
    sizes = dict(_files(started_s - _CLOCK_S))
    total = last.shmem_bytes if last else sum(sizes.values())
    if total <= MIB:
        return ""
    own = [path for path, size in sizes.items() if size <= total]  # a larger one is another's
    largest = sorted(own, key=lambda path: -sizes[path])
    named = few([f"{one_line(path)} ({format_bytes(sizes[path])})" for path in largest])
    who = "the command left" if last else "while it ran, files of a tmpfs got"
    return f"{who} {format_bytes(total)} of shared memory: {named or 'in no file that is visible'}"


def _files(since_s: float) -> Iterator[tuple[str, int]]:
    """Yield the path and the size in memory of each file in a tmpfs that changed since then."""
    places = [one.place for one in mounts.read() if one.kind in ("tmpfs", "ramfs")]
    for place in places:
        for folder, below, names in os.walk(place):
            below[:] = [name for name in below if not os.path.ismount(Path(folder, name))]
            for path in (Path(folder, name) for name in names):
                try:
                    state = path.lstat()
                except OSError:  # removed meanwhile
                    continue
                if stat.S_ISREG(state.st_mode) and state.st_ctime >= since_s:
                    yield str(path), state.st_blocks * 512
