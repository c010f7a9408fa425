"""The kernel's side of cgroups: a v1, v2 or hybrid tree of plain files in a temporary folder.

A group gets the files of a kernel's group, is removed only if no process and no group is in it, and
a write has the effect that the kernel gives it. The isolation thus works here as on a real tree, also
for a user without root; only what a kernel charges and kills is missing.
"""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from leftovers import lives

from weighin.isolation import cgroup as cgroup_isolation
from weighin.probes import cgroup

UNLIMITED_V1 = 9223372036854771712
LAYOUTS = ("v1", "hybrid", "v2")

_MEMORY_V1 = {
    "memory.usage_in_bytes": "0",
    "memory.max_usage_in_bytes": "0",
    "memory.limit_in_bytes": str(UNLIMITED_V1),
    "memory.memsw.limit_in_bytes": str(UNLIMITED_V1),
    "memory.swappiness": "60",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    "memory.stat": "total_rss 0\ntotal_shmem 0\ntotal_inactive_file 0\n",
}
_MEMORY_V2 = {
    "memory.current": "0",
    "memory.peak": "0",
    "memory.max": "max",
    "memory.high": "max",
    "memory.swap.max": "max",
    "memory.oom.group": "1",  # the kernel's default is 0, which a test could not tell from a write
    "memory.events": "max 0\noom 0\noom_kill 0\n",
    "memory.events.local": "max 0\noom 0\noom_kill 0\n",
    "memory.stat": "anon 0\nshmem 0\ninactive_file 0\n",
}


class Kernel:
    """A kernel with one tree of cgroups: ``memory`` is the root of the memory controller's hierarchy,
    ``unified`` that of the v2 tree, which v1 has not."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.left_out: set[str] = set()  # files that this kernel's groups have not
        self.refused: set[Path] = set()  # this user may not write to this file, or make groups here
        self.busy: set[Path] = set()  # groups with a process that does not end
        self.ended: set[int] = set()  # still read in a group, but gone when they are to be moved
        self.mounts = folder / "mountinfo"
        self.swaps = folder / "swaps"
        self.swaps.write_text("Filename Type Size Used Priority\n/swapfile file 1048576 0 -2\n")
        self._rmdir, self._mkdir, self._write = os.rmdir, os.mkdir, Path.write_text
        self._access = os.access
        is_v1 = layout != "v2"
        self.unified = None if layout == "v1" else folder / "unified"
        self.memory = folder / "memory" if is_v1 else folder / "unified"
        self.roots = [root for root in dict.fromkeys((self.memory, self.unified)) if root]
        v1 = f"30 23 0:30 / {self.memory} rw - cgroup cgroup rw,memory\n" if is_v1 else ""
        v2 = f"40 23 0:40 / {self.unified} rw - cgroup2 cgroup2 rw\n" if self.unified else ""
        self.mounts.write_text(v1 + v2)
        for root in self.roots:
            root.mkdir()
            self._fill(root)
        if self.unified:
            controllers = "cpu pids\n" if is_v1 else "cpu io memory pids\n"
            self._write(self.unified / "cgroup.controllers", controllers)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process see this kernel's groups, and no others."""
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        monkeypatch.setattr(os, "access", self.access)
        # A bound method would not get the path.
        monkeypatch.setattr(Path, "write_text", lambda path, *a, **k: self.write(path, *a, **k))  # noqa: PLW0108
        monkeypatch.setattr(cgroup, "MOUNTS", self.mounts)
        monkeypatch.setattr(cgroup_isolation, "_SWAPS", self.swaps)
        monkeypatch.setattr(cgroup, "_group_of", self.group_of)

    def put(self, pid: int, group: Path) -> None:
        for procs in self._root_of(group).rglob("cgroup.procs"):
            others = [each for each in procs.read_text().split() if each != str(pid)]
            self._write(procs, "".join(f"{each}\n" for each in others))
        procs = group / "cgroup.procs"
        self._write(procs, f"{procs.read_text()}{pid}\n")

    def group_of(self, pid: int, version: int) -> str | None:
        """Return the group of a process as /proc/PID/cgroup names it."""
        root = self.unified if version == 2 else self.memory
        for procs in root.rglob("cgroup.procs") if root else ():
            if str(pid) in procs.read_text().split():
                return f"/{procs.parent.relative_to(root or '')}".replace("/.", "/")
        return "/"

    def groups(self) -> list[Path]:
        """Return all groups below the roots."""
        found = (Path(folder) for root in self.roots for folder, _, _ in os.walk(str(root)))
        return [group for group in found if group not in self.roots]

    # -- system calls

    def mkdir(self, path: Any, *arguments: Any, **options: Any) -> None:
        group = Path(path)
        if group.parent in self.refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(group))
        self._mkdir(path, *arguments, **options)
        if self._is_group(group):
            self._fill(group)

    def rmdir(self, path: Any, *arguments: Any, **options: Any) -> None:
        group = Path(path)
        if self._is_group(group):
            below = [each for each in group.iterdir() if each.is_dir()]
            if below or group in self.busy or any(map(lives, self._members(group))):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group))
            for file in group.iterdir():
                file.unlink()
        self._rmdir(path, *arguments, **options)

    def access(self, path: Any, mode: int, **options: Any) -> bool:
        return Path(path) not in self.refused and self._access(path, mode, **options)

    def write(self, path: Path, text: str, *arguments: Any, **options: Any) -> int:
        group = path.parent
        if not (self._is_group(group) or group in self.roots):
            return self._write(path, text, *arguments, **options)
        if path in self.refused or not path.exists():  # nobody makes files in a cgroup
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if path.name == "cgroup.procs":
            self.put(int(text), group)
            if int(text) in self.ended:
                rest = [pid for pid in self._members(group) if pid != int(text)]
                self._write(path, "".join(f"{pid}\n" for pid in rest))
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(path))
        elif path.name == "cgroup.subtree_control":
            if text == "-memory":
                enabled = [each for each in path.read_text().split() if each != "memory"]
                self._write(path, " ".join(enabled))
            else:
                self._enable(group, text.removeprefix("+"))
        elif path.name == "cgroup.kill" and text == "1":
            for folder, _, _ in os.walk(group):
                for pid in filter(lives, self._members(Path(folder))):
                    os.kill(pid, signal.SIGKILL)
        else:
            self._check_v1(path, int(text) if text.removeprefix("-").isdigit() else 0)
            self._write(path, text)
        return len(text)

    # -- rules of the kernel

    def _check_v1(self, path: Path, value: int) -> None:
        """Refuse a memory limit above that of memory and swap, as v1 does."""
        limits = dict.fromkeys(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), 0)
        if path.name not in limits or not (path.parent / "memory.memsw.limit_in_bytes").exists():
            return
        for name in limits:
            limits[name] = value if name == path.name else int((path.parent / name).read_text())
        memory, memory_and_swap = (UNLIMITED_V1 if n == -1 else n for n in limits.values())
        if memory > memory_and_swap:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    def _enable(self, group: Path, controller: str) -> None:
        if controller not in (group / "cgroup.controllers").read_text().split():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(group))
        if group not in self.roots and self._members(group):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group))
        control = group / "cgroup.subtree_control"
        self._write(control, f"{control.read_text()} {controller}")
        for child in group.iterdir():
            if child.is_dir():
                self._fill(child)

    def _fill(self, group: Path) -> None:
        """Make the files that a group has and this one has not yet."""
        files = {"cgroup.procs": ""}
        if self._root_of(group) == self.unified:
            enabled = group.parent / "cgroup.subtree_control"
            controllers = enabled.read_text().split() if group not in self.roots else []
            files |= {"cgroup.controllers": " ".join(controllers), "cgroup.subtree_control": ""}
            files |= {"memory.pressure": "some avg10=0.00 total=0\n", "cgroup.kill": ""}
            if "memory" in controllers:
                files |= _MEMORY_V2
        else:
            files |= _MEMORY_V1
        for name, text in files.items():
            is_new = not (group / name).exists() or name == "cgroup.controllers"
            if is_new and name not in self.left_out:
                self._write(group / name, text)

    def _root_of(self, group: Path) -> Path:
        return next(root for root in self.roots if group.is_relative_to(root))

    def _is_group(self, folder: Path) -> bool:
        return any(root in folder.parents for root in self.roots)

    @staticmethod
    def _members(group: Path) -> list[int]:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split() if pid != "0"]


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> Iterator[Kernel]:
    """Let this process see a kernel with this layout until the block ends."""
    kernel = Kernel(folder, layout)
    kernel.install(monkeypatch)
    cgroup_isolation.groups_root.cache_clear()
    try:
        yield kernel
    finally:
        cgroup_isolation.groups_root.cache_clear()
