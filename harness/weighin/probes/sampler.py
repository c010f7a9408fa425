"""Sample the memory of what is measured, in a thread of weighin: a load every 5 ms, a command every 20.

A report shows the samples as a timeline. Peaks come from the kernel's high-water marks instead,
because samples miss short spikes. Each process's share of the memory and its mapped files are
expensive to read. The sampler therefore reads them only when a command uses clearly more memory than
at the last such reading.
"""

import contextlib
import csv
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from weighin.probes.memory import SampledMemory
from weighin.probes.process_table import Pause, ProcessTable
from weighin.result import Sample
from weighin.units import MIB

_FAST_INTERVAL_S: Final = 0.001
_MUCH_MORE: Final = 1.2  # times the usage of the last table; then a new table is read at once
_PRIORITY: Final = 1  # the lowest real-time priority
_NEAR: Final = 4  # the limit is near if the command's growth meets it within so many intervals


class Sampler:
    """Samples ``memory`` until ``stop`` is called.

    The peak is the sample with the most needed memory (``Sample.needed_bytes``). Among samples with
    needed memory within 1 % (at least 1 MiB) of the most, the one with the highest total usage is
    the peak. Page cache counts only in this total, because the kernel can reclaim page cache.

    Attributes:
        oom_kills: the number of OOM kills in the cgroup and below it, because the cgroup may be
            removed later; None without a cgroup.
        peak: the sample at the peak; None without samples.
        table: the processes of a command; None for a load.
        caches_bytes: on cgroup v1, the kernel memory that was left when all processes had ended:
            caches of files' names, which the kernel reclaims. v1 does not count them apart.
    """

    def __init__(
        self,
        memory: SampledMemory,
        interval_s: float | None = None,
        at_sample: Callable[[int, int], None] | None = None,
    ) -> None:
        """Prepare the sampler; ``start`` starts its thread.

        Args:
            at_sample: a function that the thread calls with (t_ns, bytes) for each sample: its
                memory without page cache.
        """
        self.samples: list[Sample] = []
        self.oom_kills: int | None = None
        self.peak: Sample | None = None
        self.caches_bytes = 0
        self.memory = memory
        self.table = None if memory.loading else ProcessTable()
        self._limit = memory.limit()
        self._interval_s = interval_s or memory.interval_s
        self._at_sample = at_sample
        self._keeping = Pause()
        self._kept: Sample | None = None
        self._most_needed_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Take a last sample, end the thread, and return all samples, the oldest first."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.memory.close()
        return self.samples

    def without_caches(self) -> list[Sample]:
        """Return the samples with ``caches_bytes``; call it when all processes have ended."""
        self.caches_bytes = self.memory.caches_bytes()
        if self.caches_bytes:
            self.peak, self._most_needed_bytes = None, 0
            for index, sample in enumerate(self.samples):
                caches_bytes = min(self.caches_bytes, sample.kernel_bytes or 0)
                self.samples[index] = replace(sample, kernel_reclaimable_bytes=caches_bytes)
                self._note_peak(self.samples[index])
        return self.samples

    def _run(self) -> None:
        if self.table:
            # A real-time priority lets the thread run although the command uses all processors; the
            # processes that it starts, such as py-spy, keep the normal one. Only root may raise it.
            with contextlib.suppress(OSError):
                policy, priority = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY)
                os.sched_setscheduler(0, policy, priority)
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
        pids = self.memory.pids()
        if self.table:
            self.table.look(pids, t_ns)
        sample = self.memory.sample(t_ns, pids)
        if (kills := self.memory.oom_kills()) is not None:
            self.oom_kills = kills
        if sample is None:
            return None
        self.samples.append(sample)
        self._note_peak(sample)
        if self.table:
            self._keep_table(self.table, sample)
        if self._at_sample:
            self._at_sample(t_ns, _used(sample))
        return sample

    def _keep_table(self, table: ProcessTable, sample: Sample) -> None:
        step_bytes = max(MIB, _usage(sample) // 100)
        most = self._most_needed_bytes
        is_new = self.memory.is_fresh and _is_more(sample, self._kept, most, step_bytes)
        is_due = self._keeping.begin()
        if is_new and (is_due or _used(sample) > _MUCH_MORE * _used(self._kept or sample)):
            table.keep(self.memory.shares(self.memory.pids()))
            self._kept = sample
            self._keeping.end()

    def _note_peak(self, sample: Sample) -> None:
        self._most_needed_bytes = max(self._most_needed_bytes, sample.needed_bytes)
        if _is_more(sample, self.peak, self._most_needed_bytes, step_bytes=1):
            self.peak = sample


def _is_more(sample: Sample, before: Sample | None, most_bytes: int, step_bytes: int) -> bool:
    """Return whether a sample uses more memory than ``before``, by the rule of ``Sampler``.

    ``most_bytes`` is the most needed memory in all samples so far. If the needed memory of the two
    samples is about equal, the total usage must be higher by ``step_bytes``.
    """
    if before is None:
        return True
    slack = max(MIB, most_bytes // 100)
    if sample.needed_bytes > before.needed_bytes + slack:
        return True
    return (
        sample.needed_bytes >= most_bytes - slack and _usage(sample) >= _usage(before) + step_bytes
    )


def _usage(sample: Sample) -> int:
    return sample.rss_bytes if sample.cgroup_bytes is None else sample.cgroup_bytes


def _used(sample: Sample) -> int:
    """Return a sample's total usage less what the kernel can reclaim, in bytes."""
    return max(_usage(sample) - sample.reclaimable_bytes, 0)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as CSV, one line per sample; a missing value is an empty field."""
    names = [field.name for field in fields(Sample)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(sample, name) for name in names] for sample in samples)
