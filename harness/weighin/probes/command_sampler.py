"""Sample the memory of a command and of all its processes, in a thread of weighin.

A report shows the samples as a timeline of anonymous memory, page cache and shared memory. Each
process's share of the memory and its mapped files are expensive to read. The sampler therefore
reads them only when the command uses clearly more memory than at the last such reading.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from weighin.probes.cgroup import MemoryCgroup
from weighin.probes.command_memory import GroupMemory, TreeMemory
from weighin.probes.process_table import Pause, ProcessTable
from weighin.result import Process, Sample
from weighin.units import MIB

DEFAULT_INTERVAL_S: Final = 0.02
_FAST_INTERVAL_S: Final = 0.001
_MUCH_MORE: Final = 1.2  # times the usage of the last table; then a new table is read at once
_PRIORITY: Final = 1  # the lowest real-time priority
_NEAR: Final = 4  # the limit is near if the command's growth meets it within so many intervals


class CommandSampler:
    """Samples a command until ``stop`` is called.

    The peak is the sample with the largest sum of anonymous and shared memory. Among samples whose
    sum is within 1 % (at least 1 MiB) of the largest, the one with the highest total usage is the
    peak. Page cache counts only in this total, because the kernel can reclaim page cache.

    Attributes:
        oom_kills: the number of OOM kills in the cgroup and below it; None without a cgroup.
        peak_ns: the time of the peak, in monotonic nanoseconds.
        largest_anon_and_shmem_bytes: the largest sum of anonymous and shared memory in one sample.
        largest_file_bytes: the most page cache in one sample; without a cgroup, the most mapped
            page cache.
        largest_kernel_bytes: the most kernel memory in one sample; None if it cannot be read.
    """

    def __init__(
        self,
        pid: int,
        cgroup: MemoryCgroup | None,
        interval_s: float = DEFAULT_INTERVAL_S,
        at_maximum: Callable[[int, int], None] | None = None,
        helpers: Collection[int] = (),
    ) -> None:
        """Prepare the sampler; ``start`` starts its thread.

        Args:
            at_maximum: a function that the thread calls with (t_ns, bytes) for each sample whose
                memory without page cache is larger than in all samples before it.
            helpers: the pids in the cgroup that belong to weighin's isolation, not to the command.
        """
        self.oom_kills: int | None = None
        self.peak_ns: int | None = None
        self.largest_anon_and_shmem_bytes: int | None = None
        self.largest_file_bytes: int | None = None
        self.largest_kernel_bytes: int | None = None
        self._samples: list[Sample] = []
        self._memory = GroupMemory(cgroup, helpers) if cgroup else TreeMemory(pid)
        self._limit = self._memory.limit()
        self._interval_s = interval_s
        self._at_maximum = at_maximum
        self._table = ProcessTable()
        self._keeping = Pause()
        self._peak: Sample | None = None
        self._kept: Sample | None = None
        self._most_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="command sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Take a last sample, end the thread, and return all samples, the oldest first."""
        self._stop.set()
        self._thread.join()
        self._memory.close()
        return self._samples

    def processes(self) -> tuple[Process, ...]:
        """Return the command's processes, each with its share of the memory near the peak."""
        return self._table.processes()

    def _run(self) -> None:
        _hasten()
        before: Sample | None = None
        while True:
            is_last = self._stop.is_set()
            start_s = time.monotonic()
            sample = self._look()
            if is_last:
                return
            due_s = start_s + self._next_interval_s(before, sample)
            before = sample
            self._stop.wait(max(due_s - time.monotonic(), 0))

    def _next_interval_s(self, before: Sample | None, now: Sample | None) -> float:
        """Return the seconds until the next sample: at most 1 ms if the command, growing as now,
        would exceed its limit within 4 intervals; else the usual interval.
        """
        if self._limit is None or before is None or now is None:
            return self._interval_s
        rate = (_used(now) - _used(before)) / (now.t_ns - before.t_ns) * 1e9
        is_near = rate * self._interval_s * _NEAR > self._limit - _used(now)
        return min(_FAST_INTERVAL_S, self._interval_s) if is_near else self._interval_s

    def _look(self) -> Sample | None:
        t_ns = time.monotonic_ns()
        pids = self._memory.pids()
        self._table.look(pids, t_ns)
        sample = self._memory.sample(t_ns, pids)
        if (kills := self._memory.oom_kills()) is not None:
            self.oom_kills = kills
        if sample is None:
            return None
        self._samples.append(sample)
        self._note_largest(sample)
        if self._at_maximum and _used(sample) > self._most_bytes:
            self._at_maximum(t_ns, _used(sample))
        self._most_bytes = max(self._most_bytes, _used(sample))
        return sample

    def _note_largest(self, sample: Sample) -> None:
        held = sample.anon_bytes + sample.shmem_bytes
        cached = _page_cache(sample)
        self.largest_anon_and_shmem_bytes = max(self.largest_anon_and_shmem_bytes or 0, held)
        self.largest_file_bytes = max(self.largest_file_bytes or 0, cached)
        if (kernel := self._memory.kernel_bytes) is not None:
            self.largest_kernel_bytes = max(self.largest_kernel_bytes or 0, kernel)
        most = self.largest_anon_and_shmem_bytes
        if _is_more(sample, self._peak, most, step_bytes=1):
            self._peak, self.peak_ns = sample, sample.t_ns
        step_bytes = max(MIB, _usage(sample) // 100)
        is_new = self._memory.is_fresh and _is_more(sample, self._kept, most, step_bytes)
        is_due = self._keeping.begin()
        if is_new and (is_due or _used(sample) > _MUCH_MORE * _used(self._kept or sample)):
            self._table.keep(self._memory.shares(self._memory.pids()))
            self._kept = sample
            self._keeping.end()


def _hasten() -> None:
    """Give the sampling thread a real-time priority, so that it runs although the command uses all
    processors.

    The processes that this thread starts, such as py-spy, keep the normal priority. ``_hasten`` has
    no effect for an ordinary user, who may not raise a priority.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))


def _is_more(sample: Sample, before: Sample | None, most_bytes: int, step_bytes: int) -> bool:
    """Return whether a sample uses more memory than ``before``, by the rule of ``CommandSampler``.

    ``most_bytes`` is the largest sum of anonymous and shared memory in all samples so far. If the
    sums of the two samples are about equal, the total usage must be higher by ``step_bytes``.
    """
    if before is None:
        return True
    held, held_before = (one.anon_bytes + one.shmem_bytes for one in (sample, before))
    slack = max(MIB, most_bytes // 100)
    if held > held_before + slack:
        return True
    return held >= most_bytes - slack and _usage(sample) >= _usage(before) + step_bytes


def _usage(sample: Sample) -> int:
    return sample.rss_bytes if sample.cgroup_bytes is None else sample.cgroup_bytes


def _page_cache(sample: Sample) -> int:
    """Return a sample's page cache less shared memory; without a cgroup, only mapped page cache."""
    if sample.cgroup_file_bytes is None:
        return sample.file_bytes
    return max(sample.cgroup_file_bytes - sample.shmem_bytes, 0)


def _used(sample: Sample) -> int:
    """Return a sample's total usage less its page cache, in bytes."""
    return _usage(sample) - _page_cache(sample)
