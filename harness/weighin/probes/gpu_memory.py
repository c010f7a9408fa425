"""Sample the GPU memory of another process with NVML, NVIDIA's library that asks the driver.

The driver also counts the CUDA context, code and the buffers of libraries, which PyTorch's
allocator does not count.
"""

import bisect
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from weighin.result import Sample

_Point = TypeVar("_Point", bound=tuple[int, ...])
_INTERVAL_S: Final = 0.02  # one query takes about a millisecond


class NvmlUnavailable(Exception):
    """NVML cannot report the memory of a process; the message is the reason."""


class DriverMemory:
    """Samples one process on one GPU, in a thread, until ``stop`` is called.

    Raises:
        NvmlUnavailable: NVML, the GPU or the process cannot be found, or NVML does not report the
            memory of single processes.
    """

    def __init__(self, uuid: str | None, pid: int | None) -> None:
        if uuid is None:
            raise NvmlUnavailable("this version of torch does not report the UUID of the GPU")
        if pid is None:
            raise NvmlUnavailable(
                "the worker does not run on this machine, so that NVML cannot find it"
            )
        self._pid = pid
        self._points: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._nvml = _start()
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


def _start() -> Any:
    """Import NVIDIA's Python module of NVML, which only machines with a GPU need, and start NVML."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise NvmlUnavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from None
    return pynvml
