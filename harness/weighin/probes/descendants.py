"""Find the descendants of a process, also after their parents have ended."""

import os
from contextlib import suppress
from math import inf
from typing import Final

import psutil

from weighin.probes.cgroup import start_time

_NOT_ORPHANS: Final = ("py-spy",)  # weighin itself starts it beside a command


class Descendants:
    """A child ``pid`` of this process, and its descendants.

    With ``adopts``, this process is a child subreaper, which becomes the parent of a descendant
    whose parent has ended. Each child that it gets meanwhile then counts as such an orphan, unless
    it started before ``pid``, or was seen below a process that did: those are foreign.
    """

    def __init__(self, pid: int, *, adopts: bool) -> None:
        self._pid, self._adopts = pid, adopts
        self._began = start_time(pid) or inf
        self._foreign: dict[int, int] = {}  # by pid: when it started, as pids are used again
        self.pids()  # a foreign process that runs now may become an orphan, too

    def pids(self) -> list[int]:
        """Return the pids of the processes that have not ended; reap orphans that have."""
        here, family, foreign, found = os.getpid(), {self._pid}, set[int](), []
        for one in psutil.Process().children(recursive=True):  # a parent is before its children
            with suppress(psutil.NoSuchProcess, ChildProcessError):  # it has ended, and was reaped
                parent, started = one.ppid(), start_time(one.pid)
                if started is None:
                    continue
                is_child = parent == here and one.pid != self._pid
                is_known = self._foreign.get(one.pid) == started
                if is_known or parent in foreign or (is_child and started < self._began):
                    foreign.add(one.pid)
                    self._foreign[one.pid] = started
                    continue
                is_orphan = is_child and self._adopts
                if is_orphan and one.name() in _NOT_ORPHANS:
                    continue
                if not (is_orphan or one.pid == self._pid or parent in family):
                    continue
                family.add(one.pid)
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
                elif is_orphan:
                    os.waitpid(one.pid, os.WNOHANG)
        return found
