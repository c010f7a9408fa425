"""Find and end the processes of a worker or command, also those that left its process group."""

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from weighin.child_process import adopt_orphans, signal_each
from weighin.probes.cgroup import is_left_behind, owned_name, read_kernel
from weighin.probes.descendants import Descendants

WORKER_VARIABLE = "WEIGHIN_WORKER"
"""The environment variable that marks a worker or command; all its processes inherit the mark."""
_PATIENCE_S = 10.0
_PAUSE_S = 0.005  # a killed process takes a moment to end, and may just have forked
_numbers = itertools.count()


class ProcessTree:
    """The processes of a worker or command: its descendants, and those that inherited its variable.

    With ``adopts``, weighin adopts its orphans until ``end``, so that it finds a daemon that clears
    its environment, too. Only the program ``weighin`` may do so: in another program, such as pytest,
    an orphan could not be told from a child that the program started meanwhile.

    Attributes:
        environment: the variable that marks the processes, also for a later run of weighin.
        spared: the names of the processes that the last ``kill`` was not allowed to kill.
    """

    def __init__(self, *, adopts: bool) -> None:
        self._mark = owned_name(next(_numbers))
        self.environment = {WORKER_VARIABLE: self._mark}
        self.spared: list[str] = []
        self._adopts = adopts
        self._adopted_before = adopts and adopt_orphans()
        self._descendants: Descendants | None = None

    def begin(self, pid: int) -> None:
        """Look from now on also for the descendants of ``pid``, a child of this process."""
        self._descendants = Descendants(pid, adopts=self._adopts)

    def members(self) -> list[int]:
        found = self._descendants.pids() if self._descendants else []
        return sorted({*found, *(pid for pid in psutil.pids() if mark_of(pid) == self._mark)})

    def kill(self) -> list[int]:
        """Send SIGKILL to all processes except those of another user; return the pids of the killed."""
        killed, self.spared = [], []
        for pid in self.members():
            try:
                signal_each([pid])
                killed.append(pid)
            except PermissionError:
                with suppress(psutil.NoSuchProcess):
                    self.spared.append(f"{psutil.Process(pid).name()} (process {pid})")
        return killed

    def end(self) -> None:
        """Kill all processes, wait up to 10 s for the end of the killed, and adopt no more orphans."""
        deadline = time.monotonic() + _PATIENCE_S
        try:
            while self.kill() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
        finally:
            if self._adopts:
                adopt_orphans(adopt=self._adopted_before)
                self._adopts = False

    def unseen(self, why: str) -> str:
        """Return ``why`` weighin sees only a part, and the processes that it was not allowed to kill."""
        spared = ", ".join(self.spared)
        return f"{why}; weighin may not end these of another user: {spared}" if spared else why


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None if it has no mark, has ended, or is another user's."""
    prefix = f"{WORKER_VARIABLE}="
    try:
        variables = read_kernel(Path(f"/proc/{pid}/environ")).split("\0")
    except OSError:
        return None
    return next((line.removeprefix(prefix) for line in variables if line.startswith(prefix)), None)


def end_orphans() -> list[str]:
    """Kill the processes whose mark names an ended weighin process; return one line for each.

    A process with the mark of this process or of one above it is not killed, because a killed run may
    have started the shell in which weighin, or a weighin around this one, runs now.
    """
    above = [one.pid for one in psutil.Process().parents()]
    ours, ended = {mark_of(pid) for pid in (os.getpid(), *above)}, dict[int, str]()
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        marks = {pid: mark for pid in psutil.pids() if (mark := mark_of(pid)) and mark not in ours}
        if not (left := {pid: mark for pid, mark in marks.items() if is_left_behind(mark)}):
            break
        signal_each(left)
        ended |= left
        time.sleep(_PAUSE_S)
    return [f"process {pid} of process {mark.partition('-')[0]}" for pid, mark in ended.items()]
