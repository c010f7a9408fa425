"""Read the memory of what is measured at one instant: of a process, a cgroup, or a tree of processes.

The kernel keeps a cgroup's sums, which are cheap to read. Without a cgroup, weighin adds up the
proportional set sizes (PSS) of the processes, because this sum counts each shared page once. Reading
a PSS takes long, because the kernel walks the whole address space.
"""

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

import psutil

from weighin import child_process
from weighin.probes.cgroup import (
    MemoryCgroup,
    all_pids,
    has_left,
    memory_cgroup_of,
    parent_of,
    pids_in,
    read_kernel,
    room_in,
    start_time,
)
from weighin.probes.process import parse_faults, parse_status, read_private, read_status
from weighin.probes.process_table import Pause, Shares, read_shares
from weighin.result import Sample
from weighin.text import one_line
from weighin.units import MIB

_FREED_S, _FREED_TRIES = 0.02, 10  # the kernel frees some memory of ended processes later
_LINKS_OF_EMPTY: Final = 2  # of a folder without subfolders
_KERNEL_PARTS: Final = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
"""The parts of kernel memory in memory.stat of v2, for kernels before 5.18, which give no sum."""
_NOT_ORPHANS: Final = ("py-spy",)  # weighin itself starts it beside a command
_SEARCH_S: Final = 0.1  # between two searches for descendants, or readings of other processes


class GroupMemory:
    """The memory of a cgroup and the groups below it.

    A sample's ``file_bytes`` is the mapped page cache: the mapped memory that the kernel reports,
    less all shared memory. A sum of PSS would miss shared memory that is written, but not mapped.
    The kernel reclaims the pages of its lists active_file and inactive_file: page cache that is not
    locked, and anonymous pages that were given back with MADV_FREE.

    Attributes:
        escape: how a process got out of the cgroup or its limit: "sh (pid 12) left the command's
            cgroup for /x"; empty if none did. systemd-run, Slurm, runexec and other programs move
            what they start into cgroups of their own.
    """

    interval_s = 0.02
    is_fresh = True

    def __init__(
        self,
        cgroup: MemoryCgroup,
        pid: int | None = None,
        helpers: Collection[int] = (),
        *,
        of_command: bool = True,
    ) -> None:
        """Open the files of the cgroup.

        Args:
            pid: the first process, to notice if it or a descendant leaves the cgroup.
            helpers: the pids of weighin's own isolation processes in the cgroup.
            of_command: whether a command is measured, or a load; ``escape`` says so.
        """
        self.escape = ""
        self._cgroup, self._pid, self._is_lifted = cgroup, pid, False
        self._who = "the command" if of_command else "the measured process"
        self._whose = "the command's" if of_command else "its"
        self._helpers = frozenset(helpers)
        self._limit = cgroup.read_limit()
        self._inside: set[int] = set()
        self._search = Pause(_SEARCH_S)
        self._files = _opened(cgroup.usage_path, cgroup.stat_path)
        self._kills: dict[str, int] = {}

    def pids(self) -> list[int]:
        """Return the pids of the processes that are visible in this pid namespace."""
        found = [pid for pid in members_of(self._cgroup.path) if pid not in self._helpers]
        if not self.escape:
            self._look_for_escapes(found)
        return found

    def _look_for_escapes(self, found: list[int]) -> None:
        limit = self._cgroup.read_limit()
        if limit != self._limit and not self._is_lifted and self._cgroup.path.exists():
            self.escape = f"{self._who} changed the limit of its cgroup"
        first = {self._pid} if self._pid else set()
        before, self._inside = self._inside | first, set(found)
        suspects = before - self._inside
        if self._pid and self._search.begin():
            family, parents = self._inside | first, {pid: parent_of(pid) for pid in all_pids()}
            while new := {pid for pid, parent in parents.items() if parent in family} - family:
                family |= new
            suspects |= family - self._inside
            self._search.end()
        for pid in suspects:
            if Path(f"/proc/{pid}").exists() and has_left(pid, self._cgroup.path):
                name = "a process"
                with contextlib.suppress(OSError):
                    name = one_line(read_kernel(Path(f"/proc/{pid}/comm")))
                where = memory_cgroup_of(pid) or "another"
                self.escape = f"{name} (pid {pid}) left {self._whose} cgroup for {where}"

    def raise_limit(self) -> None:
        """Remove the limit, so that a killed process that thrashes can exit quickly."""
        self._is_lifted = True
        self._cgroup.raise_limit()

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
            usage, text = (_pread(file) for file in self._files)
            stat = self._cgroup.parse_stat(text)
            anon, file, shmem = (stat.get(name, 0) for name in ("anon", "file", "shmem"))
            listed = stat.get("active_file", 0) + stat.get("inactive_file", 0)
            freed = min(max(listed - (file - shmem), 0), anon)
            mapped = max(stat.get("file_mapped", 0) - shmem, 0)
            parts = [stat[part] for part in _KERNEL_PARTS if part in stat]
            kernel = stat.get("kernel", sum(parts) if parts else None)
            if self._cgroup.version == 1:
                kernel = self._cgroup.read_kernel()
            major = stat.get("pgmajfault", 0)
            return Sample(
                t_ns=t_ns,
                rss_bytes=anon - freed + mapped + shmem,
                anon_bytes=anon - freed,
                file_bytes=mapped,
                shmem_bytes=shmem,
                swap_bytes=stat.get("swap", 0),
                minor_faults=stat.get("pgfault", 0) - major,
                major_faults=major,
                cgroup_bytes=int(usage),
                cgroup_file_bytes=file,
                cgroup_shmem_bytes=shmem,
                locked_bytes=min(max(file - shmem - listed, 0), stat.get("unevictable", 0)),
                freed_bytes=freed,
                kernel_bytes=kernel,
                kernel_reclaimable_bytes=stat.get("slab_reclaimable"),
                socket_bytes=stat.get("sock"),
                slab_bytes=stat.get("slab"),
                page_tables_bytes=stat.get("pagetables"),
            )
        except (OSError, ValueError):
            return None

    def shares(self, pids: list[int]) -> dict[int, Shares]:
        """Return the parts (``Shares``) of each process's PSS by pid, if this user can read them."""
        return _read_shares(pids)

    def oom_kills(self) -> int | None:
        """Return how many processes the OOM killer killed in the group and the groups below it.

        On v2, the number includes groups that have been removed.
        """
        for folder in _folders(self._cgroup.path):
            kills = MemoryCgroup(Path(folder)).read_oom_kills()
            if kills is not None:
                self._kills[folder] = kills
        seen = sum(self._kills.values()) if self._kills else None
        ever = self._cgroup.read_oom_kills_below()
        return seen if ever is None else max(ever, seen or 0)

    def limit(self) -> int | None:
        """Return the most memory that the group can have, in bytes; None without a limit."""
        return room_in(self._cgroup.path)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


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
            with contextlib.suppress(
                psutil.NoSuchProcess, ChildProcessError
            ):  # it has ended, and was reaped
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


class FamilyMemory:
    """The memory of a process and its descendants, as the sum of their proportional set sizes.

    weighin adopts the process's orphans, which still belong to the tree. A sample between two sums
    repeats the last sum. If the anonymous memory of just one process has changed since the last sum,
    the sample includes this change.
    """

    interval_s = 0.02
    is_fresh = False
    """Whether the last sample is a new sum of proportional set sizes."""
    escape = ""

    def __init__(self, pid: int, *, adopts: bool = True) -> None:
        self._descendants = Descendants(pid, adopts=adopts)
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

    def raise_limit(self) -> None:
        return None

    def close(self) -> None:
        return


class _Process:
    """The files of one process in /proc, which stay open, so that a reading takes about 50 us."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.last_peak_rss_bytes: int | None = None
        self.samples: list[Sample] = []
        self._files = _opened(Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/stat"))

    def sample(self, t_ns: int) -> Sample | None:
        try:
            status_text, stat_text = map(_pread, self._files)
            status, (minor, major) = parse_status(status_text), parse_faults(stat_text)
            self.last_peak_rss_bytes = status["VmHWM"]
            return Sample(
                t_ns=t_ns,
                rss_bytes=status["VmRSS"],
                anon_bytes=status["RssAnon"],
                file_bytes=status["RssFile"],
                shmem_bytes=status["RssShmem"],
                swap_bytes=status.get("VmSwap", 0),
                minor_faults=minor,
                major_faults=major,
            )
        except (OSError, KeyError, ValueError):  # it has ended, or is a zombie without memory
            return None

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class ProcessMemory:
    """The memory of the process that loads a model, or of its children that do so together (ranks).

    Of a sample of several ranks, the anonymous memory is the sum over the ranks. File-backed and
    shared memory are those of the cgroup, which counts a shared page only once. Without a cgroup,
    each of the two is the largest value of any one rank.

    Attributes:
        others: the most other processes at once that the process started, and the largest sum of
            their private memory (pages that no other process maps), in bytes; (0, 0) with ranks.
    """

    is_fresh = True

    def __init__(
        self,
        pid: int,
        cgroup: MemoryCgroup | None,
        helpers: Collection[int] = (),
        *,
        ranks: int = 1,
    ) -> None:
        """``ranks`` is the number of processes that load; if there are several, they all run by now."""
        self.interval_s = (
            0.005 * ranks
        )  # so that ranks take no more processor time than one process
        self.others = 0, 0
        self._whole: GroupMemory | FamilyMemory
        if cgroup:
            self._whole = GroupMemory(cgroup, pid, helpers, of_command=False)
        else:
            self._whole = FamilyMemory(pid, adopts=child_process.is_program)
        self._not_others = {pid, os.getpid()}
        self._pause = Pause(_SEARCH_S)  # the kernel walks the address space of each process
        self._processes = [_Process(one) for one in (_ranks_of(pid) if ranks > 1 else [pid])]
        self._has_ranks = ranks > 1

    @property
    def escape(self) -> str:
        return self._whole.escape

    @property
    def last_peaks_rss_bytes(self) -> list[int | None]:
        """The last ``VmHWM`` that was read of each process."""
        return [each.last_peak_rss_bytes for each in self._processes]

    @property
    def rank_samples(self) -> dict[int, list[Sample]]:
        """The samples of each rank, by the rank's number."""
        ranks = enumerate(self._processes) if self._has_ranks else ()
        return {number: each.samples for number, each in ranks}

    def pids(self) -> list[int]:
        return self._whole.pids()

    def sample(self, t_ns: int, pids: list[int]) -> Sample | None:
        """Return a sample of the process or of all ranks; None if none of them runs any more."""
        if not self._has_ranks:
            self._add_up_others(pids)
        found = [each.sample(t_ns) for each in self._processes]
        group = self._whole.sample(t_ns, pids) if isinstance(self._whole, GroupMemory) else None
        if not any(found):
            return None
        if not self._has_ranks:
            (sample,) = found
        else:
            sample = self._sum(found, group)
        if not sample or not group:
            return sample
        return replace(
            sample,
            cgroup_bytes=group.cgroup_bytes,
            cgroup_file_bytes=group.cgroup_file_bytes,
            cgroup_shmem_bytes=group.cgroup_shmem_bytes,
        )

    def _sum(self, found: list[Sample | None], group: Sample | None) -> Sample:
        for rank, sample in zip(self._processes, found, strict=True):
            if sample:
                rank.samples.append(sample)
        now = [rank.samples[-1] for rank in self._processes if rank.samples]
        shmem = group.shmem_bytes if group else max(each.shmem_bytes for each in now)
        file = max(each.file_bytes for each in now)
        if group:
            file = max((group.cgroup_file_bytes or 0) - shmem, 0)
        anon = sum(each.anon_bytes for each in now)
        return Sample(
            t_ns=now[-1].t_ns,
            rss_bytes=anon + file + shmem,
            anon_bytes=anon,
            file_bytes=file,
            shmem_bytes=shmem,
            swap_bytes=sum(each.swap_bytes for each in now),
            minor_faults=sum(each.minor_faults for each in now),
            major_faults=sum(each.major_faults for each in now),
        )

    def _add_up_others(self, pids: list[int]) -> None:
        if not self._pause.begin():
            return
        sizes = []
        for pid in pids:
            if pid not in self._not_others:
                with contextlib.suppress(OSError):  # the process has ended
                    sizes.append(read_private(pid))
        number, private_bytes = self.others
        self.others = max(number, len(sizes)), max(private_bytes, sum(sizes))
        self._pause.end()

    def shares(self, pids: list[int]) -> dict[int, Shares]:
        return self._whole.shares(pids)

    def caches_bytes(self) -> int:
        return 0

    def oom_kills(self) -> int | None:
        return self._whole.oom_kills()

    def limit(self) -> None:
        return None  # its peaks are exact, so it is not sampled faster near its limit

    def raise_limit(self) -> None:
        self._whole.raise_limit()

    def close(self) -> None:
        self._whole.close()
        for each in self._processes:
            each.close()


def _ranks_of(pid: int) -> list[int]:
    """Return the pids of a worker's ranks, in the order of their numbers."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error, KeyError, ValueError):  # another child
                found[int(child.environ()["RANK"])] = child.pid
    return [found[number] for number in sorted(found)]


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


def _opened(*paths: Path) -> list[int]:
    """Open small files of the kernel for many readings; none if one of them is gone."""
    files: list[int] = []
    for path in paths:
        try:
            files.append(os.open(path, os.O_RDONLY))
        except OSError:  # the process has ended, or the group was removed
            while files:
                os.close(files.pop())
            break
    return files


def _pread(file: int) -> str:
    return os.fsdecode(os.pread(file, 16384, 0))  # a process's name may be no UTF-8


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
