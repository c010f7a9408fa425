"""Sample the child processes of a measured process (worker), whose own RSS leaves them out."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import psutil

from weighin.probes.cgroup import MemoryCgroup, pids_in, read_kernel
from weighin.probes.process import read_private
from weighin.probes.process_table import Pause

WORKER_VARIABLE: Final = "WEIGHIN_WORKER"
"""The environment variable that marks a worker; all processes of the worker inherit the mark."""
_INTERVAL_S: Final = 0.1


class OtherProcesses:
    """A worker's child processes, found in its cgroup or, without one, by its mark (``mark_of``).

    Attributes:
        number: the largest number of child processes at any time.
        private_bytes: the largest sum of the child processes' private memory (pages that no other
            process maps) at any time.
    """

    def __init__(
        self, pid: int, cgroup: MemoryCgroup | None, helpers: Collection[int] = ()
    ) -> None:
        """``helpers`` are the pids in the cgroup that belong to the isolation."""
        self.number = self.private_bytes = 0
        self._cgroup = cgroup
        self._known: dict[int, bool] = {}
        self._pid, self._mark = pid, ""
        self._not_others = {pid, os.getpid(), *helpers}
        self._pause = Pause(_INTERVAL_S)  # the kernel walks the address space of each process

    def sample(self) -> None:
        """Read the memory of the child processes; do nothing within 0.1 s of the last reading."""
        if not self._pause.begin():
            return
        sizes = []
        for pid in self._pids():
            try:
                sizes.append(read_private(pid))
            except OSError:  # the process has ended
                continue
        self.number = max(self.number, len(sizes))
        self.private_bytes = max(self.private_bytes, sum(sizes))
        self._pause.end()

    def _pids(self) -> list[int]:
        found: list[int] = []
        # Just after the start of a program, Linux does not show its variables yet.
        self._mark = self._mark or mark_of(self._pid) or ""
        if self._cgroup:
            found = pids_in(self._cgroup.path)
        elif self._mark:
            self._known = {
                pid: self._known[pid] if pid in self._known else mark_of(pid) == self._mark
                for pid in psutil.pids()
            }
            found = [pid for pid, is_ours in self._known.items() if is_ours]
        return [pid for pid in found if pid not in self._not_others]


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None if it has no mark, has ended, or is another user's."""
    return variable_of(pid, WORKER_VARIABLE)


def variable_of(pid: int, name: str) -> str | None:
    """Return an environment variable from a process's start; None if unset or not readable."""
    prefix = f"{name}="
    try:
        variables = read_kernel(Path(f"/proc/{pid}/environ")).split("\0")
    except OSError:
        return None
    return next((line.removeprefix(prefix) for line in variables if line.startswith(prefix)), None)
