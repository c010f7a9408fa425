"""Find a worker and all processes that it started by a mark that they inherit.

A child in its own session has left the worker's process group, and a child of root may have left
the worker's cgroup. After its parent's death, the mark still identifies such a child: a variable in
its environment, and a limit of the process, which it keeps if it clears its environment.
"""

import contextlib
import itertools
import os
import resource
import signal
import time

from weighin.probes.cgroup import all_pids, is_left_behind, owned_name
from weighin.probes.other_processes import WORKER_VARIABLE, has_mark, limit_of, mark_of

_PATIENCE_S = 10.0
_numbers = itertools.count()


def new_mark() -> str:
    """Return a unique value for the variable: this process's name and a number."""
    return owned_name(next(_numbers))


def environment(mark: str) -> dict[str, str]:
    """Return the environment that gives this mark to a process and all its descendants."""
    return {WORKER_VARIABLE: mark}


def set_limit(pid: int, mark: str) -> None:
    """Give this mark's limit to a process that starts now, and so to all its descendants.

    The limit is a CPU time of millions of years for realtime scheduling.
    """
    with contextlib.suppress(OSError, ValueError):  # it has ended, or has a smaller hard limit
        _, hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)
        resource.prlimit(pid, resource.RLIMIT_RTTIME, (limit_of(mark), hard))


def members(mark: str) -> list[int]:
    """Return all processes with this mark."""
    return [pid for pid in all_pids() if has_mark(pid, mark)]


def kill(mark: str) -> list[int]:
    """Send SIGKILL to all processes with this mark, and return them."""
    found = members(mark)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def end(mark: str) -> None:
    """Kill all processes with this mark; return when they have ended, or after 10 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while kill(mark) and time.monotonic() < deadline:
        time.sleep(0.005)  # a killed process takes a moment to end, and may just have forked


def end_orphans(*, any_lock: bool = False) -> list[str]:
    """Kill the processes whose mark names a dead owner; return one line for each process."""
    orphans = [
        (pid, mark)
        for pid in all_pids()
        if (mark := mark_of(pid)) and is_left_behind(mark, any_lock=any_lock)
    ]
    for mark in {mark for _, mark in orphans}:
        end(mark)
    return [f"process {pid} of process {mark.partition('-')[0]}" for pid, mark in orphans]
