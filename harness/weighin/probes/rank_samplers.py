"""Sample each rank of a cell: find the processes that a worker started, and their numbers."""

from weighin.probes.cgroup import all_pids, parent_of
from weighin.probes.other_processes import variable_of
from weighin.probes.sampler import Sampler
from weighin.result import Sample


class RankSamplers:
    """Samples the ranks that a worker started, each in a thread of its own.

    The interval grows with the number of ranks, so that all threads together take no more time of
    the processor than the thread of one worker.
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
        """End the sampling, and return the samples of each rank by its number."""
        return {rank: sampler.stop() for rank, sampler in sorted(self._samplers.items())}

    @property
    def last_peaks_rss_bytes(self) -> list[int]:
        """The last sampled ``VmHWM`` of each rank, in bytes."""
        peaks = [sampler.last_peak_rss_bytes for sampler in self._samplers.values()]
        return [peak for peak in peaks if peak is not None]


def _rank(pid: int) -> int | None:
    """Return the variable RANK of a process; None if it has none or is not visible."""
    value = variable_of(pid, "RANK") or ""
    return int(value) if value.isdecimal() else None
