"""Sample the child processes of a measured process (worker), whose own RSS leaves them out."""

import os
from pathlib import Path
from typing import Final

from weighin.probes.cgroup import MemoryCgroup, all_pids, parent_of, pids_in, read_kernel
from weighin.probes.process import read_private
from weighin.probes.process_table import Pause

WORKER_VARIABLE: Final = "WEIGHIN_WORKER"
"""The environment variable that marks a worker; all processes of the worker inherit the mark."""
_LEAST_LIMIT: Final = 2**61
_INTERVAL_S: Final = 0.1


class OtherProcesses:
    """A worker's child processes, found in its cgroup or, without one, by its mark (``has_mark``).

    Attributes:
        number: the largest number of child processes at any time.
        private_bytes: the largest sum of the child processes' private memory (pages that no other
            process maps) at any time.
    """

    def __init__(self, pid: int, cgroup: MemoryCgroup | None) -> None:
        self.number = self.private_bytes = 0
        self._cgroup = cgroup
        self._known: dict[int, bool] = {}
        self._mark = None if cgroup else mark_of(pid)
        self._not_others = {
            pid,
            os.getpid(),
            parent_of(pid),
        }  # in a container, the parent is weighin's keeper
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
    """Return the resource limit by which weighin recognises a worker's processes.

    A child process may clear its environment, but it inherits the limit. The limit is one of
    realtime CPU time, between 2**61 and 2**62 microseconds. It encodes ``mark``, which is a result
    of ``owned_name``: the pid (22 bits), the pid namespace (32 bits) and the number's last 7 bits.
    """
    owner, _, number = mark.rpartition(".")
    pid, _, namespace = owner.split("-")
    bits = int(pid) << 39 | int(namespace) << 7 | int(number.partition("-")[0]) % 2**7
    return _LEAST_LIMIT + bits


def owner_by_limit(pid: int) -> tuple[int, int] | None:
    """Return weighin's (pid, pid namespace) from the ``limit_of`` a process inherited, or None."""
    limit = _limit(pid)
    if limit is None or not _LEAST_LIMIT <= limit < 2 * _LEAST_LIMIT:
        return None
    bits = limit - _LEAST_LIMIT
    return bits >> 39, bits >> 7 & 0xFFFF_FFFF


def has_mark(pid: int, mark: str) -> bool:
    """Return whether a process inherited ``mark``, in its environment or as a resource limit."""
    return mark_of(pid) == mark or _limit(pid) == limit_of(mark)


def _limit(pid: int) -> int | None:
    """Return the soft limit of a process's realtime CPU time; None if there is none."""
    try:
        text = read_kernel(Path(f"/proc/{pid}/limits"))
    except OSError:  # the process has ended
        return None
    _, _, after = text.partition("Max realtime timeout ")
    soft = after.lstrip().partition(" ")[0]
    return int(soft) if soft.isdecimal() else None


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
