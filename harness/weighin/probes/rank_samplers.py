"""Sample each rank of a cell: the child processes of a worker that have the variable RANK."""

from weighin.probes.cgroup import all_pids, parent_of
from weighin.probes.other_processes import variable_of
from weighin.probes.sampler import Sampler
from weighin.result import Sample


class RankSamplers:
    """Samples each rank that a worker started in a thread.

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
    """Return the variable RANK of a process; None if it cannot be read."""
    value = variable_of(pid, "RANK") or ""
    return int(value) if value.isdecimal() else None
