"""Observe a running worker (measured process) from outside: sample its memory, read its cgroup."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from weighin.probes.cgroup import MemoryCgroup, PeakMark, has_left, pressure_file_of
from weighin.probes.other_processes import OtherProcesses
from weighin.probes.sampler import Sampler
from weighin.result import Sample


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a cgroup at one instant; without a cgroup, all numbers are None.

    ``peak_bytes`` is the high-water mark since its last reset, or since the group's creation.
    ``some_ns`` and ``full_ns`` are PSI's stall times. ``escape`` tells how a worker got out of its
    limit, such as "left its cgroup"; it is empty if the worker is still limited.
    """

    usage_bytes: int | None = None
    peak_bytes: int | None = None
    refaults: int | None = None
    some_ns: int | None = None
    full_ns: int | None = None
    oom_kills: int | None = None
    limit_events: dict[str, int] | None = None
    escape: str = ""


def observe(mark: PeakMark | None) -> Observation:
    """Read the state of the cgroup of ``mark``; without a ``mark``, all numbers are None."""
    if mark is None:
        return Observation()
    cgroup = mark.cgroup
    some_ns, full_ns = cgroup.read_pressure_ns()
    return Observation(
        usage_bytes=cgroup.read_usage(),
        peak_bytes=mark.read(),
        refaults=cgroup.read_refaults(),
        some_ns=some_ns,
        full_ns=full_ns,
        oom_kills=cgroup.read_oom_kills(),
        limit_events=cgroup.read_limit_events(),
    )


def grown(before: int | None, after: int | None) -> int | None:
    """Return the growth of a counter; None if one of the two readings is missing."""
    return None if before is None or after is None else after - before


class Observer:
    """Observes a worker, and its memory cgroup if it has one, until ``stop`` is called."""

    def __init__(
        self,
        pid: int,
        cgroup: Path | None,
        interval_s: float,
        *,
        is_alone: bool = True,
        helpers: Collection[int] = (),
    ) -> None:
        """``is_alone`` is False if the worker starts ranks; then child processes are not sampled.

        ``helpers`` are the pids in the cgroup that belong to the isolation.
        """
        self._pid = pid
        self._cgroup = MemoryCgroup(cgroup, pressure_file_of(pid)) if cgroup else None
        self._limit_bytes = self._cgroup.read_limit() if self._cgroup else None
        self._mark = PeakMark(self._cgroup) if self._cgroup else None
        self._others = OtherProcesses(pid, self._cgroup, helpers)
        others = self._others if is_alone else None
        self._sampler = Sampler(pid, self._cgroup, interval_s, others)
        self._sampler.start()

    @property
    def oom_kills(self) -> int | None:
        """The number of OOM kills at the last sample, because the cgroup may be removed later."""
        return self._sampler.oom_kills

    @property
    def last_peak_rss_bytes(self) -> int | None:
        """The last sampled ``VmHWM`` of the worker, in bytes."""
        return self._sampler.last_peak_rss_bytes

    @property
    def others(self) -> tuple[int, int]:
        """The most child processes at once, and the largest sum of their private memory in bytes."""
        return self._others.number, self._others.private_bytes

    def look(self) -> Observation:
        """Read the current state of the cgroup."""
        return replace(observe(self._mark), escape=self._escape(self._cgroup))

    def _escape(self, cgroup: MemoryCgroup | None) -> str:
        if cgroup is None:
            return ""
        if self._sampler.has_left or has_left(self._pid, cgroup.path):
            return "left its cgroup"
        if cgroup.path.exists() and cgroup.read_limit() != self._limit_bytes:
            return "changed the limit of its cgroup"
        return ""

    def reset_peak(self) -> bool:
        """Reset the high-water mark to the present charge; return whether the kernel can do so."""
        return self._mark is not None and self._mark.reset()

    def raise_limit(self) -> None:
        """Remove the limit, so that a killed worker that thrashes can exit quickly."""
        if self._cgroup:
            self._cgroup.raise_limit()
            self._limit_bytes = self._cgroup.read_limit()

    def stop(self) -> list[Sample]:
        """End the sampling and return all samples, the oldest first."""
        samples = self._sampler.stop()
        if self._mark:
            self._mark.close()
        return samples
