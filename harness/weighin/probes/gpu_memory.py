"""The GPU memory of another process: sampled with NVML, and the timeline of its CUDA allocator.

NVML is NVIDIA's library that asks the driver, which also counts the CUDA context, code and the buffers
of libraries. PyTorch's allocator does not count these, but its events give an exact timeline of
requested and reserved bytes. They lack the sizes of blocks, so that there is none of allocated bytes:
a record has their peak in each phase, and its samples have them over time.
"""

import bisect
import csv
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from weighin.result import Sample

_Point = TypeVar("_Point", bound=tuple[int, ...])
_INTERVAL_S: Final = 0.02  # one query takes about a millisecond
TRACE_EVENTS: Final = 1_000_000
"""The number of events that the allocator keeps; a load causes two or three events per tensor."""

# A request ends when the GPU no longer uses its memory, as in the allocator's requested_bytes.
_REQUESTED: Final = {"alloc": 1, "free_completed": -1}
_RESERVED: Final = {
    "segment_alloc": 1,
    "segment_free": -1,
    "segment_map": 1,  # only expandable segments have this event
    "segment_unmap": -1,
}
FIELDS: Final = ("t_ns", "action", "bytes", "requested_bytes", "reserved_bytes")


class NvmlUnavailable(Exception):
    """NVML cannot report the memory of a process; the message is the reason."""


class DriverMemory:
    """Samples one process on one GPU, in a thread, until ``stop`` is called.

    Raises:
        NvmlUnavailable: NVML, the GPU or the process cannot be found, or NVML does not report the
            memory of single processes.
    """

    def __init__(self, uuid: str | None, pid: int) -> None:
        if uuid is None:
            raise NvmlUnavailable("this version of torch does not report the UUID of the GPU")
        try:
            import pynvml  # of NVIDIA, which only machines with a GPU need
        except ModuleNotFoundError:
            why = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
            raise NvmlUnavailable(why) from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailable(f"NVML does not start: {error}") from None
        self._pid = pid
        self._points: list[tuple[int, int]] = []
        self._stop = threading.Event()
        try:
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.driver_version = str(self._nvml.nvmlSystemGetDriverVersion())
            self._points.append((time.monotonic_ns(), self._used_bytes()))
        except (self._nvml.NVMLError, NvmlUnavailable) as error:
            self._nvml.nvmlShutdown()
            if isinstance(error, NvmlUnavailable):
                raise
            raise NvmlUnavailable(f"NVML: {error}") from None
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[int, int]]:
        """End the sampling and return the samples: (monotonic ns, bytes)."""
        self._stop.set()
        self._thread.join()
        self._nvml.nvmlShutdown()
        return self._points

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            now = time.monotonic_ns()
            try:
                self._points.append((now, self._used_bytes()))
            except (self._nvml.NVMLError, NvmlUnavailable):  # the process has ended
                return

    def _used_bytes(self) -> int:
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        used = {one.pid: one.usedGpuMemory for one in processes}
        if self._pid not in used:
            raise NvmlUnavailable(
                f"NVML lists no process {self._pid}: another PID namespace, or MIG"
            )
        if used[self._pid] is None:
            raise NvmlUnavailable(
                "NVML does not report the memory of single processes on this machine"
            )
        return int(used[self._pid])


def with_cuda(
    samples: list[Sample],
    points: list[tuple[int, int, int]],
    driver_points: list[tuple[int, int]] | None,
) -> list[Sample]:
    """Return the samples; add to each sample the last GPU figures that were read until its time.

    ``points`` come from the worker: (monotonic ns, allocated bytes, driver's bytes).
    ``driver_points`` come from NVML and replace the worker's driver bytes; None without NVML.
    """
    if not points:
        return samples
    joined = []
    for sample in samples:
        _, allocated, driver = _latest(points, sample.t_ns) or (0, None, None)
        if driver_points is not None:
            driver = (_latest(driver_points, sample.t_ns) or (0, None))[1]
        joined.append(replace(sample, cuda_allocated_bytes=allocated, cuda_driver_bytes=driver))
    return joined


def _latest(points: Sequence[_Point], t_ns: int) -> _Point | None:
    index = bisect.bisect_right(points, t_ns, key=lambda point: point[0]) - 1
    return points[index] if index >= 0 else None


@dataclass(slots=True)
class Trace:
    """A trace: the requested and reserved bytes at its start, and its events.

    An event is (monotonic ns, action, bytes).
    """

    requested_bytes: int
    reserved_bytes: int
    events: list[tuple[int, str, int]] = field(default_factory=list)

    def steps(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield each event with the requested and the reserved bytes after it, as in ``FIELDS``."""
        requested, reserved = self.requested_bytes, self.reserved_bytes
        for t_ns, action, size in self.events:
            requested += _REQUESTED.get(action, 0) * size
            reserved += _RESERVED.get(action, 0) * size
            yield t_ns, action, size, requested, reserved

    def doubts(self, requested_peak_bytes: int | None) -> list[str]:
        """Return warnings about an incomplete or inconsistent trace.

        ``requested_peak_bytes`` is the peak of requested bytes that the allocator itself counted.
        """
        warnings = []
        if len(self.events) >= TRACE_EVENTS:
            warnings.append(
                f"the allocator kept only its last {TRACE_EVENTS:,} events: the trace lacks its start"
            )
        peak = max((step[3] for step in self.steps()), default=self.requested_bytes)
        peak = max(peak, self.requested_bytes)
        if requested_peak_bytes is not None and peak != requested_peak_bytes:
            warnings.append(
                f"the trace's largest requested bytes, {peak:,}, differ from the allocator's own"
                f" peak, {requested_peak_bytes:,}"
            )
        if any(later[0] < earlier[0] for earlier, later in pairwise(self.events)):
            warnings.append("the machine's clock was set during the trace: its times jump")
        return warnings


def write_trace(path: Path, trace: Trace) -> None:
    """Write the timeline as CSV: a header of ``FIELDS``, then one line per event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(trace.steps())
