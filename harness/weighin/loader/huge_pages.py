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
"""The alignment in bytes of torch's own allocations, which affects how some operations round."""

MAP_NORESERVE: Final = 0x4000
"""A flag from linux/mman.h: the kernel's overcommit heuristic ignores a mapping with this flag."""


class Area:
    """Fresh memory in huge pages for adjacent tensors, in the same order as in a range of a file.

    Each tensor has its own storage, so that saving one tensor writes no other tensor. Pages that
    hold only one tensor are freed with that tensor; shared pages are freed with the area's last
    tensor.

    Args:
        size: the size of the range, in bytes.
        offset: the range's offset in its file. The memory has the same offset within its page,
            rounded down to ``TENSOR_ALIGNMENT``, so that a disk can write into it without a buffer.
    """

    def __init__(self, size: int, offset: int) -> None:
        self._size = size
        self._memory, self._first = _huge(size, _lead(offset))

    @property
    def whole(self) -> torch.Tensor:
        """The whole area as one tensor of bytes, to be filled."""
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self._size, offset=self._first
        )

    def tensor(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor whose elements begin ``at`` bytes after the start of the range."""
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
    """Return a flat uninitialised tensor, in huge pages if it is large and on the CPU.

    Without huge pages, page faults on fresh 4 KiB pages take most of the time of a load from the
    page cache. The tensor has its own storage, which is freed with the tensor.

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
    """Return the offset within a page for memory that is read from ``offset`` of a file, in bytes.

    The result is ``offset`` modulo the page size, rounded down to ``TENSOR_ALIGNMENT``.
    """
    within = offset % ALIGNMENT
    return within - within % TENSOR_ALIGNMENT


def _huge(size: int, lead: int) -> tuple[mmap.mmap, int]:
    """Map ``size`` bytes that begin ``lead`` bytes after a huge page's start.

    Return the mapping, and the offset in it at which these bytes begin.
    """
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    area = mmap.mmap(-1, size + HUGE_PAGE_BYTES + lead, flags=flags)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE_BYTES
    # Whole huge pages only: a partly used huge page at the end would be charged in full.
    ask_for_huge_pages(area, skip, (size + lead) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return area, skip + lead
