"""A worker and all that it started, found by a mark in their environment.

A child that entered a session of its own has left the worker's process group, and once its parent
is dead nothing else tells whose it was; but /proc/PID/environ still says what it was started with.
Where there is a cgroup, that does the same without gaps: this is for plain processes.
"""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

from weighin.probes.cgroup import is_alive, this_process

_VARIABLE = "WEIGHIN_WORKER"
_PATIENCE_S = 10.0
_numbers = itertools.count()


def new_mark() -> str:
    """Return a mark that no other worker has: its owner, and a number."""
    return f"{this_process()}.{next(_numbers)}"


def environment(mark: str) -> dict[str, str]:
    """Return the variable that makes a process, and all that it starts, bear this mark."""
    return {_VARIABLE: mark}


def end(mark: str) -> None:
    """Kill all that bears this mark; returns when it is gone, or could not be killed for 10 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while (members := [pid for pid, found in _marked() if found == mark]) and (
        time.monotonic() < deadline
    ):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # a killed process takes a moment, and may have forked just before


def end_orphans() -> list[str]:
    """Kill what bears the mark of a dead owner; returns one line for each process."""
    orphans = [(pid, mark) for pid, mark in _marked() if not is_alive(_owner(mark))]
    for mark in {mark for _, mark in orphans}:
        end(mark)
    return [f"process {pid} of process {_owner(mark).partition('-')[0]}" for pid, mark in orphans]


def _owner(mark: str) -> str:
    return mark.rpartition(".")[0]


def _marked() -> list[tuple[int, str]]:
    """Return every process of this user that bears a mark: its pid and the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        prefix = f"{_VARIABLE}=".encode()
        marks = [line.removeprefix(prefix) for line in variables if line.startswith(prefix)]
        found += [(int(folder.name), mark.decode()) for mark in marks[:1]]
    return found
