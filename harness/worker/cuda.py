"""The CUDA allocator's own peaks: requested, allocated and reserved bytes of one device.

Three different figures: what tensors asked for, that rounded up to blocks, and the segments that
the allocator holds from the driver. The driver's own used memory is sampled beside them.
"""

import threading
import time
from dataclasses import replace

import torch

from harness.record import Phase

_SAMPLE_INTERVAL_S = 0.005
_KINDS = ("requested", "allocated", "reserved")


class CudaMemory:
    """The memory of one CUDA device, as this process's allocator counts it.

    Creates the context first: its memory belongs to the baseline, not to the load.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timeline: list[tuple[int, int, int]] = []
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.reset()
        threading.Thread(target=self._sample, name="cuda sampler", daemon=True).start()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def complete(self, phase: Phase) -> Phase:
        """Return the phase with the allocator's peaks since the last reset."""
        stats = torch.cuda.memory_stats(self.device)
        requested, allocated, reserved = (stats[f"{kind}_bytes.all.peak"] for kind in _KINDS)
        return replace(
            phase,
            end=replace(phase.end, cuda_allocated_bytes=self.allocated()),
            peak_cuda_requested_bytes=requested,
            peak_cuda_allocated_bytes=allocated,
            peak_cuda_reserved_bytes=reserved,
        )

    def take_timeline(self) -> list[tuple[int, int, int]]:
        """Return and forget the samples so far: (t_ns, allocated bytes, driver-used bytes)."""
        taken, self._timeline = self._timeline, []
        return taken

    def _sample(self) -> None:
        while True:
            free, total = torch.cuda.mem_get_info(self.device)
            self._timeline.append((time.monotonic_ns(), self.allocated(), total - free))
            time.sleep(_SAMPLE_INTERVAL_S)
