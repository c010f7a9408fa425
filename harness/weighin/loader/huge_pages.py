"""Allocate memory in huge pages for tensors, and view a tensor's memory as bytes."""

import ctypes
import mmap
import weakref
from typing import Final

import torch

from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.loader.vectored import ALIGNMENT

HUGE_PAGE_BYTES: Final = 2 * 1024**2

TENSOR_ALIGNMENT: Final = 64
"""The alignment of torch's own allocations in bytes. The alignment affects how some operations round."""

MAP_NORESERVE: Final = 0x4000
"""A flag of linux/mman.h: the kernel does not count the mapping's size as committed memory."""


class Area:
    """Newly allocated memory in huge pages for tensors that are adjacent in a file.

    Each tensor has its own storage, so that ``torch.save`` of one tensor writes no other tensor.
    When a tensor is freed, the pages that hold only this tensor are freed, too. All other pages are
    freed with the last tensor of the area.

    Args:
        size: the size of the range of the file, in bytes.
        offset: the range's offset in the file. Each tensor gets the same offset within a page in memory
            as in the file, rounded down to ``TENSOR_ALIGNMENT``, so that direct reads need no buffer.
    """

    def __init__(self, size: int, offset: int) -> None:
        self._size = size
        self._memory, self._first = _huge(size, _lead(offset))

    @property
    def whole(self) -> torch.Tensor:
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self._size, offset=self._first
        )

    def tensor(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor that begins ``at`` bytes after the start of the area."""
        first = self._first + at
        last = first + numel * dtype.itemsize
        view = memoryview(self._memory)[first:last]
        low = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        high = last // mmap.PAGESIZE * mmap.PAGESIZE
        if low < high:
            give_back = weakref.finalize(
                view, self._memory.madvise, mmap.MADV_DONTNEED, low, high - low
            )
            give_back.atexit = False
        return torch.frombuffer(view, dtype=dtype)


def allocate(numel: int, dtype: torch.dtype, device: torch.device, offset: int = 0) -> torch.Tensor:
    """Return a flat uninitialised tensor; a tensor of 2 MiB or more on the CPU gets huge pages.

    Without huge pages, faults of 4 KiB pages would take most of the time of a load from the page cache.

    Args:
        offset: the tensor's offset in its file, as for an ``Area``.
    """
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    memory, first = _huge(size, _lead(offset))
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=first)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _lead(offset: int) -> int:
    """Return ``offset`` modulo 4096, rounded down to a multiple of ``TENSOR_ALIGNMENT``."""
    within = offset % ALIGNMENT
    return within - within % TENSOR_ALIGNMENT


def _huge(size: int, lead: int) -> tuple[mmap.mmap, int]:
    """Map ``size`` bytes that begin ``lead`` bytes after the start of a huge page.

    Return the mapping, and the offset of these bytes in the mapping.
    """
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    area = mmap.mmap(-1, size + HUGE_PAGE_BYTES + lead, flags=flags)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE_BYTES
    # Only whole huge pages, because the kernel charges a partly used huge page in full.
    ask_for_huge_pages(area, skip, (size + lead) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return area, skip + lead
