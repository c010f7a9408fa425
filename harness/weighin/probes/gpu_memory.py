"""The CUDA devices of this machine, and the GPU memory of another process.

torch lists the devices in a subprocess, so that this process imports no torch. NVML, NVIDIA's library
that asks the driver, gives the memory of a process, with the CUDA context, code and the buffers of
libraries. PyTorch's allocator does not count these, but its events give an exact timeline.
"""

import bisect
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from weighin import child_process
from weighin.child_process import Parent, end_with_parent
from weighin.result import Sample
from weighin.text import one_line

_TIMEOUT_S: Final = 120
_INSTEAD: Final = "weighin predict MODEL --device cuda needs no GPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device; its position in ``GpuAnswer.gpus`` is torch's index of it."""

    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    gpus: tuple[Gpu, ...] = ()
    why: str = ""
    repair: str = ""


@cache
def look() -> GpuAnswer:
    """Return the devices that torch finds; the first call imports torch in a subprocess."""
    command = child_process.module("weighin.probes.gpu_memory")
    try:
        answer, why = child_process.ask(command, child_process.environment(), timeout_s=_TIMEOUT_S)
    except TimeoutError:
        return GpuAnswer((), f"torch does not list GPUs within {_TIMEOUT_S} s", _INSTEAD)
    if not answer:
        return GpuAnswer((), f"torch failed while listing GPUs: {one_line(why)}", _INSTEAD)
    if gpus := tuple(Gpu(**gpu) for gpu in answer["gpus"]):
        return GpuAnswer(gpus)
    why = f"torch {answer['torch']} finds no CUDA GPU"
    repair = "nvidia-smi shows whether the driver finds one"
    if not answer["cuda"]:
        why = f"this torch ({answer['torch']}) is built without CUDA"
        repair = "install a CUDA build (pytorch.org/get-started)"
    return GpuAnswer((), why, f"{repair}, or: {_INSTEAD}")


class NvmlUnavailable(Exception):
    """The message is the reason."""


class DriverMemory:
    """The memory of one process on one GPU, until ``close``."""

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
        try:
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.driver_version = str(self._nvml.nvmlSystemGetDriverVersion())
            self._used_bytes()
        except (self._nvml.NVMLError, NvmlUnavailable) as error:
            self.close()
            if isinstance(error, NvmlUnavailable):
                raise
            raise NvmlUnavailable(f"NVML: {error}") from None

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def read(self) -> int | None:
        """Return the bytes; None when the process has ended. One query takes about a millisecond."""
        with suppress(self._nvml.NVMLError, NvmlUnavailable):
            return self._used_bytes()
        return None

    def _used_bytes(self) -> int:
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        used = {one.pid: one.usedGpuMemory for one in processes}
        why = "NVML does not report the memory of single processes on this machine"
        if self._pid not in used:
            why = f"NVML lists no process {self._pid}: another PID namespace, or MIG"
        if used.get(self._pid) is None:
            raise NvmlUnavailable(why)
        return int(used[self._pid])


def with_cuda(
    samples: list[Sample], points: list[tuple[int, int, int]], *, by_nvml: bool
) -> list[Sample]:
    """Return the samples with the worker's last figures before each: ``points`` have the monotonic ns, the
    allocated bytes, and the driver's bytes, unless the samples have these already (``by_nvml``).
    """
    joined = []
    for sample in samples:
        index = bisect.bisect_right(points, sample.t_ns, key=lambda point: point[0])
        _, allocated, driver = points[index - 1] if index else (0, None, None)
        driver = sample.cuda_driver_bytes if by_nvml else driver
        joined.append(replace(sample, cuda_allocated_bytes=allocated, cuda_driver_bytes=driver))
    return joined if points else samples


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
