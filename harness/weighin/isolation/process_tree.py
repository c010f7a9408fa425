"""Find a worker and all processes that it started by a variable in their environment.

A child in its own session has left the worker's process group; after its parent's death, only
/proc/PID/environ still identifies such a child. This module is for plain processes, because a
cgroup lists all its processes.
"""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

from weighin.probes.cgroup import is_left_behind, owned_name

_VARIABLE = "WEIGHIN_WORKER"
_PATIENCE_S = 10.0
_numbers = itertools.count()


def new_mark() -> str:
    """Return a unique value for the variable: this process's name and a number."""
    return owned_name(next(_numbers))


def environment(mark: str) -> dict[str, str]:
    """Return the environment that gives this mark to a process and all its descendants."""
    return {_VARIABLE: mark}


def end(mark: str) -> None:
    """Kill all processes with this mark; return when they have ended, or after 10 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while (members := [pid for pid, its_mark in _marked() if its_mark == mark]) and (
        time.monotonic() < deadline
    ):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # a killed process takes a moment to end, and may just have forked


def end_orphans() -> list[str]:
    """Kill the processes whose mark names a dead owner; return one line for each process."""
    orphans = [(pid, mark) for pid, mark in _marked() if is_left_behind(mark)]
    for mark in {mark for _, mark in orphans}:
        end(mark)
    return [f"process {pid} of process {mark.partition('-')[0]}" for pid, mark in orphans]


def _marked() -> list[tuple[int, str]]:
    """Return the pid and the mark of every process of this user that has a mark."""
    marked = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        prefix = f"{_VARIABLE}=".encode()
        marks = [line.removeprefix(prefix) for line in variables if line.startswith(prefix)]
        marked += [(int(folder.name), mark.decode()) for mark in marks[:1]]
    return marked
