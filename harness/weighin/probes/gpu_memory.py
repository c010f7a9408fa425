"""The CUDA devices of this machine, which torch lists in a subprocess, and the GPU memory of another process.

NVML, NVIDIA's library that asks the driver, counts also the CUDA context, code and the buffers of
libraries, which PyTorch's allocator does not.
"""

import bisect
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from weighin import child_process
from weighin.child_process import Parent, end_with_parent
from weighin.result import Sample
from weighin.text import one_line


class Gpu(NamedTuple):
    name: str
    total_bytes: int


class GpuAnswer(NamedTuple):
    gpus: tuple[Gpu, ...] = ()  # a device's index is torch's
    why: str = ""
    repair: str = ""


@cache
def look() -> GpuAnswer:
    """Return the devices that torch finds; the first call imports torch in a subprocess."""
    command, repair = child_process.module("weighin.probes.gpu_memory"), ""
    try:
        answer, why = child_process.ask(command, child_process.environment(), 120)
    except TimeoutError:
        answer, why = None, "no answer in 120 s"
    if not answer:
        why = f"torch failed while listing GPUs: {one_line(why)}"
    elif gpus := tuple(Gpu(**gpu) for gpu in answer["gpus"]):
        return GpuAnswer(gpus)
    elif answer["cuda"]:
        why = f"torch {answer['torch']} finds no CUDA GPU"
        repair = "nvidia-smi shows whether the driver finds one, or: "
    else:
        why = f"this torch ({answer['torch']}) is built without CUDA"
        repair = "install a CUDA build (pytorch.org/get-started), or: "
    return GpuAnswer((), why, f"{repair}weighin predict MODEL --device cuda needs no GPU")


class NvmlUnavailable(Exception):
    """The message is the reason."""


class DriverMemory:
    """Samples one process on one GPU, in a thread, until ``stop``."""

    def __init__(self, uuid: str | None, pid: int) -> None:
        try:
            import pynvml  # of NVIDIA, which only machines with a GPU need
        except ModuleNotFoundError:
            why = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
            raise NvmlUnavailable(why) from None
        if uuid is None:
            raise NvmlUnavailable("this version of torch does not report the UUID of the GPU")
        self._nvml: Any = pynvml
        self._pid, self._stop = pid, threading.Event()
        self._points: list[tuple[int, int]] = []
        try:
            self._nvml.nvmlInit()
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.driver_version = str(self._nvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            raise NvmlUnavailable(f"NVML: {error}") from None
        self._look()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[int, int]]:
        self._stop.set()
        self._thread.join()
        self._nvml.nvmlShutdown()
        return self._points

    def _run(self) -> None:
        with suppress(NvmlUnavailable):  # the process has ended
            while not self._stop.wait(0.02):  # one query takes about a millisecond
                self._look()

    def _look(self) -> None:
        now, nvml = time.monotonic_ns(), self._nvml
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except nvml.NVMLError as error:
            raise NvmlUnavailable(f"NVML: {error}") from None
        used = {one.pid: one.usedGpuMemory for one in processes}.get(self._pid)
        if used is None:
            why = f"NVML does not report the memory of process {self._pid}: another PID namespace, or MIG"
            raise NvmlUnavailable(why)
        self._points.append((now, int(used)))


def with_cuda(
    samples: list[Sample],
    points: list[tuple[int, int, int]],
    driver_points: list[tuple[int, int]] | None,
) -> list[Sample]:
    """Return the samples with the last GPU figures before each: the worker's ``points`` (monotonic ns,
    allocated bytes, driver's bytes), and the driver's bytes of NVML if it has any.
    """

    def latest(points: Sequence[tuple[int, ...]], t_ns: int, field: int) -> int | None:
        index = bisect.bisect_right(points, t_ns, key=lambda point: point[0]) - 1
        return points[index][field] if index >= 0 else None

    if not points:
        return samples
    joined = []
    for one in samples:
        allocated, driver = (latest(points, one.t_ns, field) for field in (1, 2))
        if driver_points is not None:
            driver = latest(driver_points, one.t_ns, 1)
        joined.append(replace(one, cuda_allocated_bytes=allocated, cuda_driver_bytes=driver))
    return joined


def main() -> None:
    end_with_parent()
    parent = Parent()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = map(torch.cuda.get_device_properties, range(count))
    gpus = [{"name": gpu.name, "total_bytes": gpu.total_memory} for gpu in found]
    parent.send("answer", torch=str(torch.__version__), cuda=torch.version.cuda, gpus=gpus)


if __name__ == "__main__":
    main()
