"""Find the descendants of a process, also after their parents have ended."""

import os
from contextlib import suppress
from typing import Final

import psutil

from weighin.probes.cgroup import start_time

_NOT_ORPHANS: Final = ("py-spy",)  # weighin itself starts it beside a command


class Descendants:
    """A child ``pid`` of this process, and its descendants.

    With ``adopts``, this process is a child subreaper, which becomes the parent of a descendant
    whose parent has ended. Each child that it gets meanwhile then counts as such an orphan.
    """

    def __init__(self, pid: int, *, adopts: bool) -> None:
        self._pid, self._adopts = pid, adopts
        # An orphan may be this process's child already, but it started after its first ancestor.
        began = start_time(pid)
        self._others = {
            one.pid
            for one in psutil.Process().children()
            if began is None or (start_time(one.pid) or 0) < began
        }

    def pids(self) -> list[int]:
        """Return the pids of the processes that have not ended; reap orphans that have."""
        here, family, found = os.getpid(), {self._pid}, []
        for one in psutil.Process().children(recursive=True):  # a parent is before its children
            with suppress(psutil.NoSuchProcess, ChildProcessError):  # it has ended, and was reaped
                is_child = one.ppid() == here
                is_orphan = is_child and self._adopts and one.pid not in {*self._others, self._pid}
                if is_orphan and one.name() in _NOT_ORPHANS:
                    continue
                if not (is_orphan or one.pid == self._pid or one.ppid() in family):
                    continue
                family.add(one.pid)
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
                elif is_orphan:
                    os.waitpid(one.pid, os.WNOHANG)
        return found
