"""Read the memory of what is measured at one instant: of a process, a cgroup, or a tree of processes.

The kernel keeps a cgroup's sums, which are cheap to read. Without a cgroup, weighin adds up the
proportional set sizes (PSS) of the processes, because this sum counts each shared page once. Reading
a PSS takes long, because the kernel walks the whole address space.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from weighin.phase_reporter import memory_of as memory_fields
from weighin.probes.cgroup import (
    MemoryCgroup,
    all_pids,
    folders_of,
    has_left,
    memory_cgroup_of,
    parent_of,
    read_kernel,
    room_in,
)
from weighin.probes.process import (
    Shares,
    parse_faults,
    parse_status,
    read_private,
    read_shares,
    read_status,
)
from weighin.probes.process_table import Pause
from weighin.result import Sample
from weighin.text import one_line
from weighin.units import MIB

_INTERVAL_S: Final = 0.02
_LOAD_INTERVAL_S: Final = 0.005
_FREED_S, _FREED_TRIES = 0.02, 10  # the kernel frees some memory of ended processes later
_KERNEL_PARTS: Final = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
"""The parts of kernel memory in memory.stat of v2, for kernels before 5.18, which give no sum."""
_SEARCH_S: Final = 0.1  # between two searches for descendants, or readings of other processes


class SampledMemory:
    """The memory of what is measured: of a command with all its processes, or of those that load.

    A command in a cgroup has what the kernel counts for the cgroup and those below it. The sample's
    ``file_bytes`` is the mapped page cache: the mapped memory that the kernel reports, less all shared
    memory. The kernel reclaims the pages of its lists active_file and inactive_file: page cache that
    is not locked, and anonymous pages that were given back with MADV_FREE.

    A command without a cgroup has the sum of the proportional set sizes of its processes, which misses
    shared memory that is written, but not mapped. A sample between two sums repeats the last sum. If
    the anonymous memory of just one process has changed since the last sum, the sample includes this
    change.

    A load has the memory of its process, or of the processes that load together (ranks). Of several,
    the anonymous memory is the sum over the ranks. File-backed and shared memory are those of the
    cgroup, which counts a shared page only once. Without a cgroup, each of the two is the largest value
    of any one rank.

    Attributes:
        escape: how a process got out of the cgroup or its limit: "sh (pid 12) left the command's
            cgroup for /x"; empty if none did. systemd-run, Slurm, runexec and other programs move
            what they start into cgroups of their own.
        is_fresh: whether the last sample is no repetition of an earlier sum.
        last_peaks_rss_bytes: the last ``VmHWM`` that was read of each process that loads.
        others: the most other processes at once that the process of a load started, and the largest
            sum of their private memory (pages that no other process maps), in bytes; (0, 0) with ranks.
        rank_samples: the samples of each of several ranks, by the rank's number.
    """

    def __init__(
        self,
        pid: int,
        members: Callable[[], list[int]],
        cgroup: MemoryCgroup | None = None,
        *,
        loading: Sequence[int] = (),
    ) -> None:
        """Open the files of the cgroup and of the processes that load: a reading then takes 50 us.

        Args:
            pid: the first process.
            members: returns the pids of all processes.
            loading: the pids of the processes that load, all of which run by now; none for a command.
        """
        # Ranks take no more processor time than one process.
        self.interval_s = len(loading) * _LOAD_INTERVAL_S or _INTERVAL_S
        self.loading, self.escape, self.others = loading, "", (0, 0)
        self.is_fresh = True
        self._pid, self._find_members, self._cgroup = pid, members, cgroup
        self._members = [pid]
        self._search = Pause(_SEARCH_S if cgroup or loading else 0.0)
        self._others_pause = Pause(_SEARCH_S)  # the kernel walks the address space of each process
        self._opened: list[int] = []
        self._processes = [self._open(f"/proc/{n}/status", f"/proc/{n}/stat") for n in loading]
        self.last_peaks_rss_bytes: list[int | None] = [None for _ in loading]
        self.rank_samples: dict[int, list[Sample]] = {}
        # Of a cgroup:
        self._limit, self._is_lifted = cgroup.read("limit") if cgroup else None, False
        self._inside: set[int] = set()
        self._files = self._open(cgroup.file("usage"), cgroup.file("stat")) if cgroup else []
        self._kills: dict[str, int] = {}
        # Of a tree of processes:
        self._sum = Pause()
        self._shares: dict[int, Shares] = {}
        self._status: dict[int, dict[str, int]] = {}
        self._counted_twice = 0

    def _open(self, *paths: str | Path) -> list[int]:
        """Open small files of the kernel; one that is gone gets a number whose readings fail."""
        files = []
        for path in paths:
            try:
                files.append(os.open(path, os.O_RDONLY))
            except OSError:  # the process has ended, or the group was removed
                return [-1, -1]
            self._opened.append(files[-1])
        return files

    def pids(self) -> list[int]:
        """Return the pids of the processes; search a tree only after a pause, as this takes long."""
        if self._cgroup:
            self._members = self._find_members()
            if not self.escape:
                self._look_for_escapes(self._cgroup, self._members)
        elif self._search.begin():
            self._members = self._find_members()
            self._search.end()
        return self._members

    def _look_for_escapes(self, cgroup: MemoryCgroup, found: list[int]) -> None:
        who, whose = "the command", "the command's"
        if self.loading:
            who, whose = "the measured process", "its"
        if not self._is_lifted and cgroup.read("limit") != self._limit and cgroup.path.exists():
            self.escape = f"{who} changed the limit of its cgroup"
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
            if Path(f"/proc/{pid}").exists() and has_left(pid, cgroup.path):
                name = "a process"
                with contextlib.suppress(OSError):
                    name = one_line(read_kernel(Path(f"/proc/{pid}/comm")))
                where = memory_cgroup_of(pid) or "another"
                self.escape = f"{name} (pid {pid}) left {whose} cgroup for {where}"

    def sample(self, t_ns: int, pids: list[int]) -> Sample | None:
        """Return a sample; None if the cgroup was removed, or nothing runs any more."""
        group = self._of_group(self._cgroup, t_ns) if self._cgroup else None
        if not self.loading:
            return group if self._cgroup else self._of_tree(t_ns, pids)
        if len(self.loading) == 1:
            self._add_up_others(pids)
        found = [self._of_process(number, t_ns) for number in range(len(self._processes))]
        if not any(found):
            return None
        sample = found[0] if len(found) == 1 else self._of_ranks(found, group)
        if not sample or not group:
            return sample
        return replace(
            sample,
            cgroup_bytes=group.cgroup_bytes,
            cgroup_file_bytes=group.cgroup_file_bytes,
            cgroup_shmem_bytes=group.cgroup_shmem_bytes,
        )

    def _of_process(self, number: int, t_ns: int) -> Sample | None:
        try:
            status_text, stat_text = map(_pread, self._processes[number])
            status, (minor, major) = parse_status(status_text), parse_faults(stat_text)
            self.last_peaks_rss_bytes[number] = status["VmHWM"]
            memory = memory_fields(status)
        except (OSError, KeyError, ValueError):  # it has ended, or is a zombie without memory
            return None
        return Sample(t_ns=t_ns, minor_faults=minor, major_faults=major, **memory)

    def _of_group(self, cgroup: MemoryCgroup, t_ns: int) -> Sample | None:
        try:
            usage, text = (_pread(file) for file in self._files)
            stat = cgroup.parse_stat(text)
            anon, file, shmem = (stat.get(name, 0) for name in ("anon", "file", "shmem"))
            listed = stat.get("active_file", 0) + stat.get("inactive_file", 0)
            freed = min(max(listed - (file - shmem), 0), anon)
            mapped = max(stat.get("file_mapped", 0) - shmem, 0)
            parts = [stat[part] for part in _KERNEL_PARTS if part in stat]
            kernel = stat.get("kernel", sum(parts) if parts else cgroup.read("kernel"))
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
        except (OSError, ValueError):  # the group was removed
            return None

    def _of_tree(self, t_ns: int, pids: list[int]) -> Sample | None:
        status = _read_statuses(pids)
        self.is_fresh = self._sum.begin()
        if self.is_fresh:
            # ``RssAnon`` is read before and after the PSS, because the processes may grow meanwhile.
            # The two readings give the bounds of what their sum counts twice: the previous result
            # stays if it lies between the bounds, else it becomes the nearer bound.
            self._shares, self._status = _read_shares(list(status)), status
            shared = sum(anon for anon, *_ in self._shares.values())
            sums = (_anon(each) - shared for each in (status, _read_statuses([*status])))
            least, most = sorted(sums)
            self._counted_twice = min(max(self._counted_twice, least), most)
            self._sum.end()
        if not self._shares or not status:
            return None
        grown = 0
        if status.keys() == self._status.keys():
            changes = [status[pid]["RssAnon"] - self._status[pid]["RssAnon"] for pid in status]
            grown = sum(changes) if len(changes) - changes.count(0) == 1 else 0
        anon = max(_anon(self._status) + grown - self._counted_twice, 0)
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

    def _of_ranks(self, found: list[Sample | None], group: Sample | None) -> Sample:
        for number, sample in enumerate(found):
            if sample:
                self.rank_samples.setdefault(number, []).append(sample)
        now = [samples[-1] for samples in self.rank_samples.values()]
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
        if not self._others_pause.begin():
            return
        sizes = []
        for pid in pids:
            if pid not in (self._pid, os.getpid()):
                with contextlib.suppress(OSError):  # the process has ended
                    sizes.append(read_private(pid))
        number, private_bytes = self.others
        self.others = max(number, len(sizes)), max(private_bytes, sum(sizes))
        self._others_pause.end()

    def shares(self, pids: list[int]) -> dict[int, Shares]:
        """Return the parts of each process's PSS by pid, if this user can read them; of a tree, as in
        the last sum.
        """
        return _read_shares(pids) if self._cgroup else self._shares

    def caches_bytes(self) -> int:
        """Return v1's kernel memory that is left without processes; 0 if processes still run."""
        if not self._cgroup or self._find_members():
            return 0
        for _ in range(_FREED_TRIES):
            if (left := self._cgroup.read("kernel") or 0) < MIB:
                break
            time.sleep(_FREED_S)
        return left

    def oom_kills(self) -> int | None:
        """Return how many processes the OOM killer killed in the group and the groups below it.

        On v2, the number includes groups that have been removed.
        """
        if not self._cgroup:
            return None
        for folder in folders_of(self._cgroup.path):
            if (kills := MemoryCgroup(Path(folder)).read_oom_kills()) is not None:
                self._kills[folder] = kills
        seen = sum(self._kills.values()) if self._kills else None
        ever = self._cgroup.numbers("oom_below").get("oom_kill")
        return seen if ever is None else max(ever, seen or 0)

    def limit(self) -> int | None:
        """Return the most memory that a command can have, in bytes; None without a limit.

        The peaks of a load are exact, so it is not sampled faster near its limit.
        """
        return room_in(self._cgroup.path) if self._cgroup and not self.loading else None

    def raise_limit(self) -> None:
        """Remove the limit, so that a killed process that thrashes can exit quickly."""
        self._is_lifted = True
        if self._cgroup:
            self._cgroup.raise_limit()

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.pop())


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
