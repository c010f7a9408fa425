"""End the processes that a command left running, and name the files that it left in memory."""

import os
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from weighin.child_process import signal_each
from weighin.isolation.base import Running
from weighin.probes import mounts
from weighin.probes.process_table import command_of
from weighin.result import Sample
from weighin.text import few, one_line
from weighin.units import MIB, format_bytes

_PAUSE_S: Final = 0.01
_CLOCK_S: Final = 0.02  # the kernel's clock for files is a little behind
_COMMAND_LENGTH: Final = 120


def end_rest(running: Running, grace_s: float, settle_s: float) -> tuple[str, ...]:
    """End the processes of a command that outlive its first process, and return their command lines.

    A process that ends by itself within ``settle_s`` is not listed. The other processes get SIGTERM,
    and SIGKILL after ``grace_s``; one that this user may not signal is neither listed nor waited for.
    """
    names, spared = [], {running.pid}

    def rest(patience_s: float) -> list[int]:
        """Wait for the end of all that are not spared; return the pids of those that still run."""
        deadline = time.monotonic() + patience_s
        while left := [pid for pid in running.members() if pid not in spared]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE_S)
        return left

    for pid in rest(settle_s):
        name = ""
        with suppress(OSError):
            name = one_line(command_of(pid), _COMMAND_LENGTH)
        try:
            signal_each([pid], signal.SIGTERM)
            names.append(name or f"process {pid}")
        except PermissionError:
            spared.add(pid)
    if rest(grace_s) or len(spared) > 1:
        running.kill()  # of a container, the engine ends also those
    return tuple(names)


def left(started_s: float, last: Sample | None) -> str:
    """Say which files of a tmpfs that changed since ``started_s`` take memory; empty below 1 MiB.

    ``last`` is the cgroup's sample after the end of all processes, with the shared memory that they
    left. Without it (and a cgroup), a file may be another program's.
    """
    if last and last.shmem_bytes <= MIB:
        return ""
    sizes: dict[str, int] = {}
    for place in (one.place for one in mounts.read() if one.kind in ("tmpfs", "ramfs")):
        for folder, below, names in os.walk(place):
            below[:] = [name for name in below if not os.path.ismount(Path(folder, name))]
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # removed meanwhile
                    state = path.lstat()
                    if stat.S_ISREG(state.st_mode) and state.st_ctime >= started_s - _CLOCK_S:
                        sizes[str(path)] = state.st_blocks * 512
    total = last.shmem_bytes if last else sum(sizes.values())
    if total <= MIB:
        return ""
    own = [path for path, size in sizes.items() if size <= total]  # a larger one is another's
    largest_first = sorted(own, key=lambda path: -sizes[path])
    named = few([f"{one_line(path)} ({format_bytes(sizes[path])})" for path in largest_first])
    who = "the command left" if last else "while it ran, files of a tmpfs got"
    return f"{who} {format_bytes(total)} of shared memory: {named or 'in no file that is visible'}"
