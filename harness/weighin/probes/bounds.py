"""Notice that a command got out of its cgroup or its limit: its figures are then of a part of it.

systemd-run, Slurm, runexec and other programs move what they start into cgroups of their own.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from weighin.probes.cgroup import (
    MemoryCgroup,
    all_pids,
    has_left,
    memory_cgroup_of,
    parent_of,
    read_kernel,
)
from weighin.probes.process_table import Pause
from weighin.text import one_line

_PAUSE_S: Final = 0.1  # between two searches for descendants


class Bounds:
    """Compares a command's processes and its limit with its cgroup.

    ``escape`` says how the command got out: "sh (pid 12) left the command's cgroup for /x"; it is
    empty if the command did not.
    """

    def __init__(self, cgroup: MemoryCgroup, pid: int | None) -> None:
        """``pid`` is the command's first process; without it, only the limit is compared."""
        self.escape = ""
        self._cgroup, self._pid = cgroup, pid
        self._limit = cgroup.read_limit()
        self._inside: set[int] = set()
        self._search = Pause(_PAUSE_S)

    def look(self, inside: Collection[int]) -> None:
        """Compare once; ``inside`` are the pids in the cgroup and below it."""
        if self.escape:
            return
        if self._cgroup.read_limit() != self._limit and self._cgroup.path.exists():
            self.escape = "the command changed the limit of its cgroup"
        first = {self._pid} if self._pid else set()
        before, self._inside = self._inside | first, set(inside)
        suspects = before - self._inside
        if self._pid and self._search.begin():
            suspects |= _descendants(self._inside | first) - self._inside
            self._search.end()
        for pid in suspects:
            if Path(f"/proc/{pid}").exists() and has_left(pid, self._cgroup.path):
                where = memory_cgroup_of(pid) or "another"
                self.escape = f"{_name(pid)} (pid {pid}) left the command's cgroup for {where}"


def _descendants(family: Collection[int]) -> set[int]:
    parents = {pid: parent_of(pid) for pid in all_pids()}
    found = set(family)
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def _name(pid: int) -> str:
    try:
        return one_line(read_kernel(Path(f"/proc/{pid}/comm")))
    except OSError:
        return "a process"
