"""Sample the memory of what is measured, in a thread of weighin: a load every 5 ms, a command every 20.

Peaks come from the kernel's high-water marks, because samples miss short spikes. A cgroup's sums are cheap
to read; for the proportional set size (PSS) of a process, the kernel walks its whole address space. So each
process's share is read only when a command uses clearly more memory than at the last such reading.
"""

import csv
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import psutil

from weighin.phase_reporter import memory_of as memory_fields
from weighin.phase_reporter import parse_faults, parse_status
from weighin.probes.cgroup import Cgroup, folders_of, outside, parent_of
from weighin.probes.process import Shares, read_rollup, read_shares, read_status
from weighin.probes.process_table import Pause, ProcessTable
from weighin.result import Sample
from weighin.units import MIB

_INTERVAL_S: Final = 0.02
_SEARCH_S: Final = 0.1  # between two searches for descendants, or readings of other processes


class Sampler:
    """Samples the memory of a command with all its processes, or of those that load."""

    def __init__(
        self,
        pid: int,
        members: Callable[[], list[int]],
        cgroup: Cgroup | None = None,
        *,
        loading: Sequence[int] = (),
        at_sample: Callable[[int, int], None] | None = None,
    ) -> None:
        """``loading`` are the pids of those that load; ``at_sample`` gets the time in ns, and bytes without caches."""
        self.samples: list[Sample] = []
        # With the most needed memory, or of those about equal, the highest total usage.
        self.peak: Sample | None = None
        self.table = ProcessTable()
        self.oom_kills: int | None = None  # in the cgroup and those below it
        self.escape = ""  # how a process got out of the cgroup or its limit
        self.caches_bytes = 0  # on v1, the kernel's caches of files' names, of ended processes
        # The most other processes at once that the process of a load started, and their private bytes.
        self.others = (0, 0)
        self.last_peaks_rss_bytes: list[int | None] = [None for _ in loading]
        self.rank_samples: dict[int, list[Sample]] = {}
        self._pid, self._find_members, self._cgroup = pid, members, cgroup
        self._loading, self._measured = loading, {pid, os.getpid(), *loading}
        self._at_sample = at_sample
        # Ranks take no more processor time than one process.
        self._interval_s = len(loading) * 0.005 or _INTERVAL_S
        self._opened: dict[str, int] = {}
        self._members = [pid]
        self._look_around_ns = 0  # when the members and kills of a load's cgroup are read again
        self._search = Pause(_SEARCH_S if cgroup or loading else 0.0)
        self._others_pause = Pause(_SEARCH_S)
        self._keeping = Pause()
        self._kept: Sample | None = None
        self._most_needed_bytes = 0
        # Of a cgroup:
        self._limit, self._is_lifted = cgroup.read("limit") if cgroup else None, False
        self._inside = {pid}
        self._kills: dict[str, int] = {}
        # Of a tree of processes:
        self._sum, self._is_fresh = Pause(), True  # False if the last sample repeats an earlier sum
        self._shares: dict[int, Shares] = {}
        self._status: dict[int, dict[str, int]] = {}
        self._counted_twice = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        self._stop.set()
        self._thread.join()
        return self.samples

    def without_caches(self) -> None:
        """Take ``caches_bytes`` into account, which v1 does not count apart, when all processes have ended."""
        group = self._cgroup
        if not group or group.read("kernel") is None or self._find_members():
            return
        deadline = time.monotonic() + 0.2  # in which the kernel frees memory of ended processes
        while (left := group.read("kernel") or 0) >= MIB and time.monotonic() < deadline:
            time.sleep(_INTERVAL_S)
        self.caches_bytes = left
        samples, self.samples, self.peak, self._most_needed_bytes = self.samples, [], None, 0
        for sample in samples:
            reclaimable_bytes = min(left, sample.kernel_bytes or 0)
            self._note(replace(sample, kernel_reclaimable_bytes=reclaimable_bytes))

    def raise_limit(self) -> None:
        self._is_lifted = True
        if self._cgroup:
            self._cgroup.raise_limit()

    def _run(self) -> None:
        if not self._loading:
            # The lowest real-time priority lets the thread run although the command uses all processors;
            # the processes that it starts, such as py-spy, keep the normal one. Only root may raise it.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        is_last = False
        try:
            while not is_last:  # the last sample is taken after the stop
                is_last, start_s = self._stop.is_set(), time.monotonic()
                self._look()
                self._stop.wait(max(start_s + self._interval_s - time.monotonic(), 0))
        finally:
            while self._opened:
                os.close(self._opened.popitem()[1])

    def _look(self) -> None:
        t_ns, pids = time.monotonic_ns(), self._members
        if not self._loading or t_ns >= self._look_around_ns or self._stop.is_set():
            # This takes three times as long as a load's own sample.
            self._look_around_ns = t_ns + int(_INTERVAL_S * 1e9)
            pids = self.pids()
            if group := self._cgroup:
                for folder in folders_of(group.path):
                    if (kills := Cgroup(Path(folder)).numbers("oom").get("oom_kill")) is not None:
                        self._kills[folder] = kills
                ever = group.numbers("oom_below").get("oom_kill")
                if self._kills or ever is not None:
                    self.oom_kills = max(ever or 0, sum(self._kills.values()))
            if not self._loading or not self._measured.issuperset(pids):
                self.table.look(pids, t_ns)
        sample = self.read(t_ns, pids)
        if sample is None:
            return
        self._note(sample)
        step_bytes = max(MIB, _usage(sample) // 100)
        if not self._loading and self._is_fresh and self._is_more(sample, self._kept, step_bytes):
            with self._keeping as is_due:
                if is_due or _used(sample) > 1.2 * _used(self._kept or sample):
                    # The shares of a tree are those of the last sum.
                    shares = _each(read_shares, self.pids()) if self._cgroup else self._shares
                    self.table.keep(shares)
                    self._kept = sample
        if self._at_sample:
            self._at_sample(t_ns, _used(sample))

    def _note(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._most_needed_bytes = max(self._most_needed_bytes, sample.needed_bytes)
        if self._is_more(sample, self.peak, step_bytes=1):
            self.peak = sample

    def _is_more(self, sample: Sample, before: Sample | None, step_bytes: int) -> bool:
        """Return whether a sample has more needed memory than ``before``, or about the most and more in all."""
        if before is None:
            return True
        slack = max(MIB, self._most_needed_bytes // 100)
        is_most = sample.needed_bytes >= self._most_needed_bytes - slack
        uses_more = _usage(sample) >= _usage(before) + step_bytes
        return sample.needed_bytes > before.needed_bytes + slack or (is_most and uses_more)

    def pids(self) -> list[int]:
        if self._cgroup:
            self._members = self._find_members()
            if not self.escape:
                self._look_for_escapes(self._cgroup)
            return self._members
        with self._search as is_due:
            if is_due:
                self._members = self._find_members()
        return self._members

    def _look_for_escapes(self, cgroup: Cgroup) -> None:
        """Look at processes that were in the cgroup before and, each 0.1 s, at descendants of those in it."""
        if not self._is_lifted and cgroup.read("limit") != self._limit and cgroup.path.exists():
            self.escape = "the limit was changed"
        inside = set(self._members)
        suspects = self._inside - inside
        self._inside = inside | {self._pid}
        with self._search as is_due:
            if is_due:
                family, parents = {*self._inside}, {pid: parent_of(pid) for pid in psutil.pids()}
                while new := {pid for pid in parents if parents[pid] in family} - family:
                    family |= new
                suspects |= family - inside
        for pid in suspects:
            if where := outside(pid, cgroup.path):
                whose = "its" if self._loading else "the command's"
                self.escape = f"a process (pid {pid}) left {whose} cgroup for {where}"

    def read(self, t_ns: int, pids: list[int]) -> Sample | None:
        stat = dict[str, int]()
        if group := self._cgroup:
            with suppress(OSError, ValueError):  # the group was removed
                charge = int(self._pread(group.file("usage")))
                stat = group.parse_stat(self._pread(group.file("stat"))) | {"charge": charge}
        if self._loading:
            return self._of_load(t_ns, pids, stat)
        if group:
            return self._of_group(group, t_ns, stat) if stat else None
        return self._of_tree(t_ns, pids)

    def _pread(self, path: str | Path) -> str:
        """Read a file that stays open, which halves the time of a load's sample."""
        if (path := str(path)) not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY)
        return os.fsdecode(os.pread(self._opened[path], 16384, 0))  # a name may be no UTF-8

    def _of_load(self, t_ns: int, pids: list[int], stat: dict[str, int]) -> Sample | None:
        """Return the sum of the ranks' anonymous memory, and the other memory of their cgroup, which counts a shared
        page only once; without a cgroup, the most of any one rank.
        """
        for number, pid in enumerate(self._loading):
            with suppress(OSError, KeyError, ValueError):  # it has ended, or is a zombie
                status = parse_status(self._pread(f"/proc/{pid}/status"))
                minor, major = parse_faults(self._pread(f"/proc/{pid}/stat"))
                self.last_peaks_rss_bytes[number] = status["VmHWM"]
                memory = memory_fields(status)
                own = Sample(t_ns=t_ns, minor_faults=minor, major_faults=major, **memory)
                self.rank_samples.setdefault(number, []).append(own)
        with self._others_pause as is_due:
            if is_due and len(self._loading) == 1:
                rollups = _each(read_rollup, [pid for pid in pids if pid not in self._measured])
                parts = (part for each in rollups.values() for part in each.items())
                private_bytes = sum(size for name, size in parts if name.startswith("Private_"))
                number, most_bytes = self.others
                self.others = max(number, len(rollups)), max(most_bytes, private_bytes)
        now = [samples[-1] for samples in self.rank_samples.values()]
        if not any(one.t_ns == t_ns for one in now):
            return None
        file, shmem = max(one.file_bytes for one in now), max(one.shmem_bytes for one in now)
        if stat and len(self._loading) > 1:
            shmem = stat.get("shmem", 0)
            file = max(stat.get("file", 0) - shmem, 0)
        summed = ("anon_bytes", "swap_bytes", "minor_faults", "major_faults")
        anon, swap, minor, major = (sum(getattr(one, name) for one in now) for name in summed)
        sample = Sample(t_ns, anon + file + shmem, anon, file, shmem, swap, minor, major)
        if not stat:
            return sample
        charge, cached, shared = (stat.get(name, 0) for name in ("charge", "file", "shmem"))
        return replace(
            sample, cgroup_bytes=charge, cgroup_file_bytes=cached, cgroup_shmem_bytes=shared
        )

    def _of_group(self, group: Cgroup, t_ns: int, stat: dict[str, int]) -> Sample:
        anon, file, shmem = (stat.get(name, 0) for name in ("anon", "file", "shmem"))
        # Page cache that is not locked, and anonymous pages that were given back (MADV_FREE):
        listed = stat.get("active_file", 0) + stat.get("inactive_file", 0)
        freed = min(max(listed - (file - shmem), 0), anon)
        mapped = max(stat.get("file_mapped", 0) - shmem, 0)
        # Kernels before 5.18 give no sum of their memory.
        kernel_parts = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
        parts = [stat[part] for part in kernel_parts if part in stat]
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
            cgroup_bytes=stat["charge"],
            cgroup_file_bytes=file,
            cgroup_shmem_bytes=shmem,
            locked_bytes=min(max(file - shmem - listed, 0), stat.get("unevictable", 0)),
            freed_bytes=freed,
            kernel_bytes=stat.get("kernel", sum(parts) if parts else group.read("kernel")),
            kernel_reclaimable_bytes=stat.get("slab_reclaimable"),
            socket_bytes=stat.get("sock"),
            slab_bytes=stat.get("slab"),
            page_tables_bytes=stat.get("pagetables"),
        )

    def _of_tree(self, t_ns: int, pids: list[int]) -> Sample | None:
        """Return the sum of the PSS, which misses shared memory that is written, but not mapped."""
        status = _each(read_status, pids)  # a zombie, which has no memory, is left out
        with self._sum as self._is_fresh:
            if self._is_fresh:
                # ``RssAnon`` is read before and after the PSS, because the processes may grow meanwhile.
                # The two readings give the bounds of what their sum counts twice: the previous result
                # stays if it lies between the bounds, else it becomes the nearer bound.
                self._shares, self._status = _each(read_shares, [*status]), status
                shared = sum(each.anon for each in self._shares.values())
                sums = (_anon(each) - shared for each in (status, _each(read_status, [*status])))
                least, most = sorted(sums)
                self._counted_twice = min(max(self._counted_twice, least), most)
        if not self._shares or not status:
            return None
        grown = 0  # since the last sum, if by just one process
        if status.keys() == self._status.keys():
            changes = [status[pid]["RssAnon"] - self._status[pid]["RssAnon"] for pid in status]
            grown = sum(changes) if len(changes) - changes.count(0) == 1 else 0
        _, file, shmem, locked, _ = map(sum, zip(*self._shares.values(), strict=True))
        anon = max(_anon(self._status) + grown - self._counted_twice, 0)
        swap = sum(one.get("VmSwap", 0) for one in status.values())
        rss = anon + file + shmem
        return Sample(t_ns, rss, anon, file, shmem, swap, 0, 0, locked_bytes=locked)


def _usage(sample: Sample) -> int:
    return sample.rss_bytes if sample.cgroup_bytes is None else sample.cgroup_bytes


def _used(sample: Sample) -> int:
    return max(_usage(sample) - sample.reclaimable_bytes, 0)


def _anon(status: dict[int, dict[str, int]]) -> int:
    return sum(one["RssAnon"] for one in status.values())


def _each(read: Callable[[int], Any], pids: Sequence[int]) -> dict[int, Any]:
    """Return what is read of each process; without those that end, or are another user's."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = read(pid)
    return {pid: value for pid, value in found.items() if value}


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    names = [field.name for field in fields(Sample)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(map(attrgetter(*names), samples))
