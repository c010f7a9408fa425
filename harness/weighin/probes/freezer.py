"""Freeze all processes of a cgroup for an instant.

The processes get no signal, and a shell does not see them as stopped jobs. On cgroup v2, SIGKILL
ends a frozen process. On v1, SIGKILL has no effect until the group is thawed. Source: cgroup-v2.rst
("cgroup.freeze") and cgroup-v1/freezer-subsystem.rst of the kernel.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from weighin.probes import mounts
from weighin.probes.cgroup import read_kernel

_PATIENCE_S: Final = 0.01  # a process in a long system call freezes only at the call's end
_LOOK_S: Final = 0.0002


class Freezer:
    """Freezes one of a command's cgroups: the first with a freezer file of v2, or else of v1."""

    def __init__(self, groups: Iterable[Path]) -> None:
        self._control: Path | None = None
        found = [group / name for name in _STATES for group in groups]
        for control in found:
            if control.exists():
                self._control = control
                self._freeze, self._thaw, self._status, self._frozen = _STATES[control.name]
                return

    @property
    def works(self) -> bool:
        return self._control is not None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[bool]:
        """Freeze all processes until the with block ends; yield whether all froze within 10 ms."""
        if self._control is None:
            yield False
            return
        try:
            yield self._stop(self._control)
        finally:
            with contextlib.suppress(OSError):  # the group was removed
                self._control.write_text(self._thaw)

    def _stop(self, control: Path) -> bool:
        try:
            control.write_text(self._freeze)
            deadline_s = time.monotonic() + _PATIENCE_S
            while self._frozen not in (control.parent / self._status).read_text():
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(_LOOK_S)
        except OSError:  # the group was removed, or is not this user's
            return False
        return True


_STATES: Final = {
    "cgroup.freeze": ("1", "0", "cgroup.events", "frozen 1"),
    "freezer.state": ("FROZEN", "THAWED", "freezer.state", "FROZEN"),
}
"""By control file: the texts that freeze and thaw, the state file, and its text once frozen."""


def groups_of(pid: int, group: Path) -> list[Path]:
    """Return a process's cgroup ``group``, and its cgroups with this name in other hierarchies.

    A container has one group in each hierarchy of cgroup v1, and one in cgroup v2.
    """
    found = [group]
    try:
        lines = read_kernel(Path(f"/proc/{pid}/cgroup")).splitlines()
    except OSError:  # it has ended
        return found
    names = {line.split(":", 2)[2] for line in lines}
    trees = {one.place for one in mounts.read() if one.kind.startswith("cgroup")}
    for name in sorted(name for name in names if name.rpartition("/")[2] == group.name):
        folders = [tree / name.lstrip("/") for tree in sorted(trees)]
        found += [folder for folder in folders if folder != group and folder.is_dir()]
    return found
