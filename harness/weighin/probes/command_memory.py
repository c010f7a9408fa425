"""Read the memory of a command at one instant, from its cgroup or else from all its processes.

The kernel keeps a cgroup's sums, which are cheap to read. Without a cgroup, weighin adds up the
proportional set sizes (PSS) of the processes, because this sum counts each shared page once. Reading
a PSS takes long, because the kernel walks the whole address space.
"""

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from weighin.probes.bounds import Bounds
from weighin.probes.cgroup import (
    MemoryCgroup,
    parse_numbers,
    pids_in,
    room_in,
)
from weighin.probes.descendants import Descendants
from weighin.probes.process import read_status
from weighin.probes.process_table import Pause, Shares, read_shares
from weighin.result import Sample
from weighin.units import MIB

_V1: Final = {
    "anon": "total_rss",
    "file": "total_cache",
    "shmem": "total_shmem",
    "mapped": "total_mapped_file",
    "swap": "total_swap",
    "faults": "total_pgfault",
    "major": "total_pgmajfault",
    "active": "total_active_file",
    "inactive": "total_inactive_file",
    "unevictable": "total_unevictable",
}
_FREED_S, _FREED_TRIES = 0.02, 10  # the kernel frees some memory of ended processes later
_LINKS_OF_EMPTY: Final = 2  # of a folder without subfolders
_V2: Final = {
    "anon": "anon",
    "file": "file",
    "shmem": "shmem",
    "mapped": "file_mapped",
    "faults": "pgfault",
    "major": "pgmajfault",
    "active": "active_file",
    "inactive": "inactive_file",
    "unevictable": "unevictable",
}
_KERNEL_PARTS: Final = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
"""The parts of kernel memory in memory.stat of v2, for kernels before 5.18, which give no sum."""


class GroupMemory:
    """The memory of a cgroup and the groups below it.

    A sample's ``file_bytes`` is the mapped page cache: the mapped memory that the kernel reports,
    less all shared memory. A sum of PSS would miss shared memory that is written, but not mapped.
    The kernel reclaims the pages of its lists active_file and inactive_file: page cache that is not
    locked, and anonymous pages that were given back with MADV_FREE.
    """

    is_fresh = True

    def __init__(
        self, cgroup: MemoryCgroup, pid: int | None = None, helpers: Collection[int] = ()
    ) -> None:
        """Open the files of the cgroup.

        Args:
            pid: the command's first process, to notice if it or a descendant leaves the cgroup.
            helpers: the pids of weighin's own isolation processes in the command's cgroup.
        """
        self._cgroup = cgroup
        self._bounds = Bounds(cgroup, pid)
        self._helpers = frozenset(helpers)
        self._names = _V1 if cgroup.version == 1 else _V2
        self._usage = os.open(cgroup.usage_path, os.O_RDONLY)
        self._stat = os.open(cgroup.stat_path, os.O_RDONLY)
        self._kills: dict[str, int] = {}

    def pids(self) -> list[int]:
        """Return the pids of the command's processes that are visible in this pid namespace."""
        found = [pid for pid in members_of(self._cgroup.path) if pid not in self._helpers]
        self._bounds.look(found)
        return found

    @property
    def escape(self) -> str:
        return self._bounds.escape

    def caches_bytes(self) -> int:
        """Return v1's kernel memory that is left without processes; 0 if processes still run."""
        if self._cgroup.version != 1 or set(members_of(self._cgroup.path)) - self._helpers:
            return 0
        for _ in range(_FREED_TRIES):
            if (left := self._cgroup.read_kernel() or 0) < MIB:
                break
            time.sleep(_FREED_S)
        return left

    def sample(self, t_ns: int, _pids: list[int]) -> Sample | None:
        """Return a sample of the cgroup's memory; None if the cgroup was removed."""
        try:
            usage = int(os.pread(self._usage, 32, 0))
            figures = parse_numbers(os.pread(self._stat, 16384, 0).decode())
        except OSError:
            return None
        now = {name: figures.get(field, 0) for name, field in self._names.items()}
        listed, file = now["active"] + now["inactive"], now["file"] - now["shmem"]
        freed = min(max(listed - file, 0), now["anon"])
        locked = min(max(file - listed, 0), now["unevictable"])
        anon, shmem = now["anon"] - freed, now["shmem"]
        mapped = max(now["mapped"] - shmem, 0)
        parts = [figures[part] for part in _KERNEL_PARTS if part in figures]
        kernel = figures.get("kernel", sum(parts) if parts else None)
        if self._cgroup.version == 1:
            kernel = self._cgroup.read_kernel()
        return Sample(
            t_ns=t_ns,
            rss_bytes=anon + mapped + shmem,
            anon_bytes=anon,
            file_bytes=mapped,
            shmem_bytes=shmem,
            swap_bytes=now.get("swap", 0),
            minor_faults=now["faults"] - now["major"],
            major_faults=now["major"],
            cgroup_bytes=usage,
            cgroup_file_bytes=now["file"],
            cgroup_shmem_bytes=shmem,
            locked_bytes=locked,
            freed_bytes=freed,
            kernel_bytes=kernel,
            kernel_reclaimable_bytes=figures.get("slab_reclaimable"),
            socket_bytes=figures.get("sock"),
            slab_bytes=figures.get("slab"),
            page_tables_bytes=figures.get("pagetables"),
        )

    def shares(self, pids: list[int]) -> dict[int, Shares]:
        """Return the parts (``Shares``) of each process's PSS by pid, if this user can read them."""
        return _read_shares(pids)

    def oom_kills(self) -> int | None:
        """Return how many processes the OOM killer killed in the group and the groups below it.

        On v2, the number includes groups that have been removed.
        """
        for folder in _folders(self._cgroup.path):
            kills = MemoryCgroup(self._cgroup.path / folder).read_oom_kills()
            if kills is not None:
                self._kills[folder] = kills
        seen = sum(self._kills.values()) if self._kills else None
        ever = self._cgroup.read_oom_kills_below()
        return seen if ever is None else max(ever, seen or 0)

    def limit(self) -> int | None:
        """Return the most memory that the group can have, in bytes; None without a limit."""
        return room_in(self._cgroup.path)

    def close(self) -> None:
        os.close(self._usage)
        os.close(self._stat)


class TreeMemory:
    """The memory of a process and its descendants, as the sum of their proportional set sizes.

    weighin adopts the command's orphans, which still belong to the tree. A sample between two sums repeats the last sum. If the anonymous
    memory of just one process has changed since the last sum, the sample includes this change.
    """

    is_fresh = False
    """Whether the last sample is a new sum of proportional set sizes."""
    escape = ""

    def __init__(self, pid: int) -> None:
        self._descendants = Descendants(pid, adopts=True)
        self._members = [pid]
        self._search, self._sum = Pause(), Pause()
        self._shares: dict[int, Shares] = {}
        self._status: dict[int, dict[str, int]] = {}
        self._counted_twice = 0

    def pids(self) -> list[int]:
        """Return the pids of the tree; search for them only after a pause, as a search takes long."""
        if self._search.begin():
            self._members = self._descendants.pids()
            self._search.end()
        return self._members

    def sample(self, t_ns: int, pids: list[int]) -> Sample | None:
        """Return a sample of the tree's memory; None if no process's memory can be read."""
        status = _read_statuses(pids)
        self.is_fresh = self._sum.begin()
        if self.is_fresh:
            self._add_up(status)
            self._sum.end()
        if not self._shares or not status:
            return None
        anon = max(_anon(self._status) + self._grown(status) - self._counted_twice, 0)
        _, file, shmem, locked, _ = map(sum, zip(*self._shares.values(), strict=True))
        return Sample(
            t_ns=t_ns,
            rss_bytes=anon + file + shmem,
            anon_bytes=anon,
            file_bytes=file,
            shmem_bytes=shmem,
            swap_bytes=sum(one.get("VmSwap", 0) for one in status.values()),
            minor_faults=0,
            major_faults=0,
            locked_bytes=locked,
        )

    def _add_up(self, status: dict[int, dict[str, int]]) -> None:
        """Read each process's PSS, and compute how many bytes the sum of ``RssAnon`` counts twice.

        ``RssAnon`` is read before and after the PSS, because the processes may grow meanwhile. The
        two readings give the bounds of the result: the previous result stays if it lies between
        the bounds, else it becomes the nearer bound.
        """
        self._shares, self._status = _read_shares(list(status)), status
        shared = sum(anon for anon, *_ in self._shares.values())
        least, most = sorted(_anon(each) - shared for each in (status, _read_statuses([*status])))
        self._counted_twice = min(max(self._counted_twice, least), most)

    def _grown(self, status: dict[int, dict[str, int]]) -> int:
        """Return the change in ``RssAnon`` since the last sum; 0 unless just one process changed."""
        if status.keys() != self._status.keys():
            return 0
        changes = [each["RssAnon"] - self._status[pid]["RssAnon"] for pid, each in status.items()]
        return sum(changes) if len(changes) - changes.count(0) == 1 else 0

    def shares(self, _pids: list[int]) -> dict[int, Shares]:
        """Return the parts (``Shares``) of each process's PSS by pid, as in the last sum."""
        return self._shares

    def caches_bytes(self) -> int:
        return 0

    def oom_kills(self) -> None:
        return None

    def limit(self) -> None:
        return None

    def close(self) -> None:
        return


def members_of(group: Path) -> list[int]:
    """Return the pids in a group and the groups below it; those of other pid namespaces are left out."""
    return [pid for folder in _folders(group) for pid in pids_in(Path(folder))]


def _folders(group: Path) -> list[str]:
    """Return the folders of a cgroup and the cgroups below it; none if the cgroup was removed."""
    try:
        if group.stat().st_nlink <= _LINKS_OF_EMPTY:
            return [str(group)]
    except OSError:  # removed
        return []
    return [folder for folder, _, _ in os.walk(group)]


def _read_shares(pids: list[int]) -> dict[int, Shares]:
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if shares := read_shares(pid):
                found[pid] = shares
    return found


def _anon(status: dict[int, dict[str, int]]) -> int:
    return sum(one["RssAnon"] for one in status.values())


def _read_statuses(pids: list[int]) -> dict[int, dict[str, int]]:
    """Return the status of each process that has memory, by pid; a zombie has no memory."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            if "RssAnon" in (status := read_status(pid)):
                found[pid] = status
    return found
