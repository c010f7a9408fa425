"""Read the CUDA allocator's peaks of one device: bytes that tensors need (requested), rounded up to blocks
(allocated), and in segments of the driver (reserved); and page-locked host memory. A thread samples what is in use.
"""

import math
import threading
import time
from typing import Any, Final

import torch

_KINDS: Final = ("requested", "allocated", "reserved")


class CudaMemory:
    """The memory of one CUDA device, whose context is created here, so that it is no memory of the load."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self.device = torch.device("cuda", device.index or 0)
        # Without this call, page-locked buffers and streams create a context on device 0.
        torch.cuda.set_device(self.device.index)
        self._timeline: list[tuple[int, int, int]] = []
        torch.zeros(1, device=self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        if limit_bytes is not None:  # the limit does not include the context
            _, total = torch.cuda.mem_get_info(self.device)
            # torch multiplies by the fraction and truncates; the next larger float gives exactly the limit.
            fraction = math.nextafter(limit_bytes / total, 1.0)
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        self.reset()
        threading.Thread(target=self._sample, name="cuda sampler", daemon=True).start()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        if hasattr(torch.cuda, "reset_peak_host_memory_stats"):  # torch 2.8
            torch.cuda.reset_peak_host_memory_stats()

    def peaks(self) -> dict[str, int | None]:
        """Return the peaks since the last reset, as fields of ``Phase``."""
        stats = torch.cuda.memory_stats(self.device)
        peaks = {f"peak_cuda_{kind}_bytes": stats.get(f"{kind}_bytes.all.peak") for kind in _KINDS}
        if hasattr(torch.cuda, "host_memory_stats"):  # torch 2.8
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
            peaks["peak_pinned_bytes"] = int(pinned)
        return peaks

    def take_timeline(self) -> list[tuple[int, int, int]]:
        """Return the samples since the last call: (t_ns, allocated bytes, bytes in use for the driver)."""
        samples, self._timeline = self._timeline, []
        return samples

    def summary(self) -> str:
        return torch.cuda.memory_summary(self.device, abbreviated=True)

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        uuid = getattr(properties, "uuid", None)  # not of every build of torch
        return {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "gpu_uuid": f"GPU-{uuid}" if uuid else None,
            "cuda": torch.version.cuda,
            "cuda_allocator": torch.cuda.get_allocator_backend(),
        }

    def notes(self) -> list[str]:
        backend = torch.cuda.get_allocator_backend()
        what = (
            "requested and reserved bytes are figures of the driver's pool, not of torch's blocks"
        )
        return [] if backend == "native" else [f"the CUDA allocator is {backend}: {what}"]

    def notes_at_end(self) -> list[str]:
        """Return a warning for each other GPU whose memory the process used."""
        others = {*range(torch.cuda.device_count())} - {self.device.index}
        return [
            f"the load also used cuda:{other}; all figures are of {self.device} alone"
            for other in sorted(others)
            if torch.cuda.max_memory_allocated(other)
        ]

    def _sample(self) -> None:
        while True:
            free, total = torch.cuda.mem_get_info(self.device)
            self._timeline.append((time.monotonic_ns(), self.allocated(), total - free))
            time.sleep(0.005)


def is_out_of_memory(error: BaseException) -> bool:
    # The driver allocates page-locked memory and contexts, and its errors have another class.
    is_drivers = isinstance(error, getattr(torch, "AcceleratorError", RuntimeError))
    is_lack = is_drivers and str(error).startswith("CUDA error: out of memory")
    return is_lack or isinstance(error, torch.cuda.OutOfMemoryError)
