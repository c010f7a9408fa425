"""Find a worker (measured process) and all its descendants, by a mark that children inherit.

A child in its own session is outside the worker's process group, and a child that runs as root may
leave the worker's cgroup. weighin therefore marks a worker with an environment variable and with a
limit on its realtime CPU time. A child inherits the variable and the limit, and keeps the limit
even if it clears its environment.
"""

import contextlib
import itertools
import os
import resource
import time
from pathlib import Path

from weighin.child_process import signal_each
from weighin.probes.cgroup import (
    all_pids,
    is_left_behind,
    owned_name,
    read_kernel,
    start_time,
    this_process,
)
from weighin.probes.other_processes import (
    WORKER_VARIABLE,
    has_mark,
    limit_of,
    mark_of,
    owner_by_limit,
)

_PATIENCE_S = 10.0
_numbers = itertools.count()


def new_mark() -> str:
    """Return a unique mark for a worker: the unique name of weighin's process, and a number."""
    return owned_name(next(_numbers))


def environment(mark: str) -> dict[str, str]:
    """Return the environment variable that marks a process and all its descendants with ``mark``."""
    return {WORKER_VARIABLE: mark}


def set_limit(pid: int, mark: str) -> None:
    """Mark a process that has just started by a resource limit, which its descendants inherit.

    The limit is a realtime CPU time of more than 70,000 years, which no process reaches.
    """
    with contextlib.suppress(
        OSError, ValueError
    ):  # the process has ended, or has a smaller hard limit
        _, hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)
        resource.prlimit(pid, resource.RLIMIT_RTTIME, (limit_of(mark), hard))


def members(mark: str) -> list[int]:
    return [pid for pid in all_pids() if has_mark(pid, mark)]


def kill(mark: str) -> list[int]:
    """Send SIGKILL to all processes that have the mark ``mark``, and return their pids."""
    found = members(mark)
    signal_each(found)
    return found


def end(mark: str) -> None:
    """Kill all processes with the given mark; return when the processes have ended, or after 10 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while kill(mark) and time.monotonic() < deadline:
        time.sleep(0.005)  # a killed process takes a moment to end, and may just have forked


def end_orphans(*, any_lock: bool = False) -> list[str]:
    """Kill the processes whose mark names an ended weighin process; return one line for each.

    The run that started the processes must have used this run's lock file, unless ``any_lock`` is
    True. A resource limit does not name a lock file, so a process that has only this mark, and not
    the environment variable, is killed only with ``any_lock``.
    """
    orphans = [
        (pid, mark)
        for pid in all_pids()
        if (mark := mark_of(pid)) and is_left_behind(mark, any_lock=any_lock)
    ]
    for mark in {mark for _, mark in orphans}:
        end(mark)
    ended = {pid: mark.partition("-")[0] for pid, mark in orphans}
    if any_lock:
        ended |= _end_by_limit()
    return [f"process {pid} of process {owner}" for pid, owner in ended.items()]


def _end_by_limit() -> dict[int, str]:
    """Kill this user's processes whose resource limit names an ended weighin process.

    Return a dict from the pid of each killed process to the pid of that weighin process.
    """
    ended: dict[int, str] = {}
    while found := {
        pid: str(owner)
        for pid in all_pids()
        if pid not in ended and (owner := _dead_owner(pid)) is not None
    }:
        signal_each(found)
        ended |= found  # look again: a process may have forked before the signal
    return ended


def _dead_owner(pid: int) -> int | None:
    """Return the ended weighin process that a process's limit names; None if it must not be killed.

    Only a process of this user may be killed, and only if its owner (that weighin process) was in
    this pid namespace. A process whose owner also started this process is not killed, because a
    killed run may have started the shell in which weighin runs now.
    """
    named = owner_by_limit(pid)
    if not named or named == owner_by_limit(os.getpid()):
        return None
    owner, namespace = named
    try:
        is_own = Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
        is_zombie = read_kernel(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[0] == "Z"
    except OSError:  # the process has ended, and was reaped
        return None
    start, owner_start = start_time(pid), start_time(owner)
    # A process that started later than its supposed descendant reuses the dead owner's pid.
    is_dead = start is not None and (owner_start is None or owner_start > start)
    same_namespace = this_process().endswith(f"-{namespace}")
    return owner if is_own and is_dead and same_namespace and not is_zombie else None
