"""Sample the measured process (worker) every 5 ms, in a thread of the measuring process.

A report shows the samples as a timeline. Peaks come from the kernel's high-water marks instead,
because samples miss short spikes. The sampling thread keeps the files in /proc open, so that one
sample takes about 50 us.
"""

import contextlib
import csv
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from weighin.probes.cgroup import (
    MemoryCgroup,
    all_pids,
    has_left,
    memory_cgroup_of,
    parent_of,
    parse_field,
)
from weighin.probes.other_processes import OtherProcesses, variable_of
from weighin.probes.process import parse_faults, parse_status
from weighin.result import Sample

DEFAULT_INTERVAL_S = 0.005


class Sampler:
    """Samples a process and its cgroup, until the process ends or ``stop`` is called."""

    def __init__(
        self,
        pid: int,
        cgroup: MemoryCgroup | None,
        interval_s: float = DEFAULT_INTERVAL_S,
        others: OtherProcesses | None = None,
    ) -> None:
        """``others`` are the worker's child processes, sampled at longer intervals."""
        self._others = others
        self.samples: list[Sample] = []
        self.oom_kills: int | None = None
        self.last_peak_rss_bytes: int | None = None
        self.has_left = False  # the cgroup, once it had entered it; a return changes nothing
        self._pid, self._group = pid, cgroup.path if cgroup else None
        self._groups, self._has_entered = "", False
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._cache_field = "cache" if cgroup and cgroup.version == 1 else "file"
        paths: dict[str, Path] = {
            "status": Path(f"/proc/{pid}/status"),
            "stat": Path(f"/proc/{pid}/stat"),
        }
        if cgroup:
            paths |= {
                "usage": cgroup.usage_path,
                "memory": cgroup.stat_path,
                "oom": cgroup.oom_path,
                "groups": Path(f"/proc/{pid}/cgroup"),
            }
        self._files: dict[str, int] = {}
        for name, path in paths.items():
            with contextlib.suppress(FileNotFoundError):  # the process may have ended
                self._files[name] = os.open(path, os.O_RDONLY)
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        """End the thread and return all samples, the oldest first."""
        self._stop.set()
        self._thread.join()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        return self.samples

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self.samples.append(self._sample())
            except (ProcessLookupError, KeyError):  # it has ended, or is a zombie without memory
                self._read_oom_kills()
                return
            if self._others:
                self._others.sample()
            due = max(due + self._interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _sample(self) -> Sample:
        now = time.monotonic_ns()
        status = parse_status(self._read("status"))
        self.last_peak_rss_bytes = status["VmHWM"]
        minor, major = parse_faults(self._read("stat"))
        self._read_oom_kills()
        self._read_groups()
        usage, stat = self._read_cgroup("usage"), self._read_cgroup("memory")
        return Sample(
            t_ns=now,
            rss_bytes=status["VmRSS"],
            anon_bytes=status["RssAnon"],
            file_bytes=status["RssFile"],
            shmem_bytes=status["RssShmem"],
            swap_bytes=status.get("VmSwap", 0),
            minor_faults=minor,
            major_faults=major,
            cgroup_bytes=int(usage) if usage else None,
            cgroup_file_bytes=parse_field(stat, self._cache_field),  # includes shared memory
            cgroup_shmem_bytes=parse_field(stat, "shmem"),
        )

    def _read_oom_kills(self) -> None:
        """Update ``oom_kills`` at each sample, because Docker removes an ended worker's cgroup."""
        if text := self._read_cgroup("oom"):
            self.oom_kills = parse_field(text, "oom_kill")

    def _read_groups(self) -> None:
        """Update ``has_left`` if the process is in other cgroups than at the last sample."""
        groups = self._read_cgroup("groups")
        if self._group is None or self.has_left or groups == self._groups:
            return
        self._groups = groups
        self.has_left = self._has_entered and has_left(self._pid, self._group)
        now = memory_cgroup_of(self._pid)
        self._has_entered |= now is not None and now.is_relative_to(self._group)

    def _read_cgroup(self, name: str) -> str:
        """Return the text of a file of the cgroup; empty without a cgroup, or if it was removed."""
        with contextlib.suppress(KeyError, OSError):
            return self._read(name)
        return ""

    def _read(self, name: str) -> str:
        return os.fsdecode(
            os.pread(self._files[name], 16384, 0)
        )  # a process's name may be no UTF-8


class RankSamplers:
    """Samples the ranks of a worker (child processes that load the model), each in its own thread.

    The interval grows with the number of ranks, so that all threads together take no more processor
    time than the thread of one worker.
    """

    def __init__(self, worker: int, interval_s: float) -> None:
        found = {
            rank: pid
            for pid in all_pids()
            if parent_of(pid) == worker and (rank := _rank(pid)) is not None
        }
        self._samplers = {
            rank: Sampler(pid, None, interval_s * len(found)) for rank, pid in found.items()
        }
        for sampler in self._samplers.values():
            sampler.start()

    def stop(self) -> dict[int, list[Sample]]:
        """End the sampling, and return each rank's samples by the rank's number."""
        return {rank: sampler.stop() for rank, sampler in sorted(self._samplers.items())}

    @property
    def last_peaks_rss_bytes(self) -> list[int]:
        """The last sampled ``VmHWM`` of each rank, in bytes."""
        peaks = [sampler.last_peak_rss_bytes for sampler in self._samplers.values()]
        return [peak for peak in peaks if peak is not None]


def _rank(pid: int) -> int | None:
    """Return a process's rank from its environment variable RANK; None if it has no such number."""
    value = variable_of(pid, "RANK") or ""
    return int(value) if value.isdecimal() else None


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as CSV, one line per sample; a missing value is an empty field."""
    names = [field.name for field in fields(Sample)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(sample, name) for name in names] for sample in samples)
