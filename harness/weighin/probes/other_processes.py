"""Sample the memory of the processes that a worker starts, which the worker's own figures lack."""

import os
import time
from pathlib import Path
from typing import Final

from weighin.probes.cgroup import MemoryCgroup, all_pids, parent_of, pids_in, read_kernel
from weighin.probes.process import read_private

WORKER_VARIABLE: Final = "WEIGHIN_WORKER"
"""Environment variable that marks a worker and, by inheritance, all processes that it starts."""
_LEAST_LIMIT: Final = 2**61
_INTERVAL_S: Final = 0.1
_SHARE: Final = 0.05  # of the time: the kernel walks the address space of each process


class OtherProcesses:
    """The processes of a worker's cgroup, or without a cgroup, those with the worker's mark.

    Attributes:
        number: how many there were at once at most.
        private_bytes: the most private memory that they held together: pages of no other process.
    """

    def __init__(self, pid: int, cgroup: MemoryCgroup | None) -> None:
        self.number = self.private_bytes = 0
        self._cgroup = cgroup
        self._known: dict[int, bool] = {}
        self._mark = None if cgroup else mark_of(pid)
        self._not_others = {pid, os.getpid(), parent_of(pid)}  # the keeper of a container
        self._due_s = 0.0

    def sample(self) -> None:
        """Look at the processes now, if the last look is long enough ago."""
        start_s = time.monotonic()
        if start_s < self._due_s:
            return
        sizes = []
        for pid in self._pids():
            try:
                sizes.append(read_private(pid))
            except OSError:  # it has ended
                continue
        self.number = max(self.number, len(sizes))
        self.private_bytes = max(self.private_bytes, sum(sizes))
        now_s = time.monotonic()
        self._due_s = now_s + max(_INTERVAL_S, (now_s - start_s) / _SHARE)

    def _pids(self) -> list[int]:
        found: list[int] = []
        if self._cgroup:
            found = pids_in(self._cgroup.path)
        elif self._mark:
            self._known = {
                pid: self._known[pid] if pid in self._known else has_mark(pid, self._mark)
                for pid in all_pids()
            }
            found = [pid for pid, is_ours in self._known.items() if is_ours]
        return [pid for pid in found if pid not in self._not_others]


def limit_of(mark: str) -> int:
    """Return the limit that marks the processes of a worker: microseconds between 2**61 and 2**62.

    ``mark`` is a name that ``owned_name`` gave. The limit holds the owner's pid (22 bits) and pid
    namespace (32 bits), and the last 7 bits of the name's number.
    """
    owner, _, number = mark.rpartition(".")
    pid, _, namespace = owner.split("-")
    bits = int(pid) << 39 | int(namespace) << 7 | int(number.partition("-")[0]) % 2**7
    return _LEAST_LIMIT + bits


def owner_by_limit(pid: int) -> tuple[int, int] | None:
    """Return the (pid, pid namespace) of the weighin whose limit a process inherited, if it did."""
    limit = _limit(pid)
    if limit is None or not _LEAST_LIMIT <= limit < 2 * _LEAST_LIMIT:
        return None
    bits = limit - _LEAST_LIMIT
    return bits >> 39, bits >> 7 & 0xFFFF_FFFF


def has_mark(pid: int, mark: str) -> bool:
    """Tell whether a process inherited this mark, in its environment or as a limit."""
    return mark_of(pid) == mark or _limit(pid) == limit_of(mark)


def _limit(pid: int) -> int | None:
    """Return the soft limit of a process's realtime CPU time; None without one."""
    try:
        text = read_kernel(Path(f"/proc/{pid}/limits"))
    except OSError:  # it has ended
        return None
    _, _, after = text.partition("Max realtime timeout ")
    soft = after.lstrip().partition(" ")[0]
    return int(soft) if soft.isdecimal() else None


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None for a process without one, of another user, or that has ended."""
    return variable_of(pid, WORKER_VARIABLE)


def variable_of(pid: int, name: str) -> str | None:
    """Return an environment variable with which a process started; None if it cannot be read."""
    prefix = f"{name}="
    try:
        variables = read_kernel(Path(f"/proc/{pid}/environ")).split("\0")
    except OSError:
        return None
    return next((line.removeprefix(prefix) for line in variables if line.startswith(prefix)), None)
