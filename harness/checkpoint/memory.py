"""Memory to read tensors into: fresh, in huge pages, and a tensor's memory as bytes."""

import ctypes
import mmap
from typing import Final

import torch

from harness.checkpoint.gathering import ALIGNMENT

HUGE_PAGE_BYTES: Final = 2 * 1024**2


def allocate(numel: int, dtype: torch.dtype, device: torch.device, offset: int = 0) -> torch.Tensor:
    """Return flat uninitialised memory; on the CPU it asks for huge pages where it is large.

    Faults on fresh 4 KiB pages are most of what a load from the cache costs. The memory is the
    tensor's own: it is given back with it, and saving or freeing it concerns no other tensor.

    Args:
        offset: where in its file the tensor begins. The memory begins as far behind a page's start:
            then a disk writes into it without a buffer between.
    """
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    lead = 0 if offset % dtype.itemsize else offset % ALIGNMENT
    area = mmap.mmap(-1, size + HUGE_PAGE_BYTES + lead, flags=mmap.MAP_PRIVATE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE_BYTES
    # Whole huge pages only: one that sticks out of the tensor would be paid for and not used.
    area.madvise(mmap.MADV_HUGEPAGE, skip, (size + lead) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.frombuffer(area, dtype=dtype, count=numel, offset=skip + lead)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, to be written to."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
