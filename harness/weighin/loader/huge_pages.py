"""Memory to read tensors into: fresh, in huge pages, and a tensor's memory as bytes."""

import ctypes
import mmap
import weakref
from typing import Final

import torch

from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.loader.vectored import ALIGNMENT

HUGE_PAGE_BYTES: Final = 2 * 1024**2

TENSOR_ALIGNMENT: Final = 64
"""Of what torch allocates, in bytes: where a tensor lies decides how some operations round."""

MAP_NORESERVE: Final = 0x4000
"""Of linux/mman.h: not counted by the kernel's overcommit heuristic, as many small mappings are not."""


class Area:
    """Fresh memory, in huge pages, in which tensors lie as in a stretch of a file.

    Each tensor has a storage of its own: saving it concerns no other, and the pages that it has alone
    are given back with it; the rest with the last.

    Args:
        size: of the stretch, in bytes.
        offset: where in its file the stretch begins. The memory begins as far behind a page's start,
            but for what torch's alignment takes away: then a disk writes into it without a buffer between.
    """

    def __init__(self, size: int, offset: int) -> None:
        self._size = size
        self._memory, self._first = _huge(size, _lead(offset))

    @property
    def whole(self) -> torch.Tensor:
        """All bytes, to be filled."""
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self._size, offset=self._first
        )

    def tensor(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor whose elements begin ``at`` so many bytes behind the stretch's start."""
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
    """Return flat uninitialised memory; on the CPU it asks for huge pages where it is large.

    Faults on fresh 4 KiB pages are most of what a load from the cache costs. The memory is the
    tensor's own: it is given back with it, and saving or freeing it concerns no other tensor.

    Args:
        offset: where in its file the tensor begins, as for an ``Area``.
    """
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    memory, first = _huge(size, _lead(offset))
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=first)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, to be written to."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _lead(offset: int) -> int:
    """Return how far behind a page's start memory begins that is read from ``offset`` of a file.

    As far as the file does, or less than 64 bytes before, where a tensor would begin otherwise.
    """
    within = offset % ALIGNMENT
    return within - within % TENSOR_ALIGNMENT


def _huge(size: int, lead: int) -> tuple[mmap.mmap, int]:
    """Return a mapping, and where in it so many bytes begin: ``lead`` behind the start of a huge page."""
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    area = mmap.mmap(-1, size + HUGE_PAGE_BYTES + lead, flags=flags)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE_BYTES
    # Whole huge pages only: one that sticks out of the tensors would be paid for and not used.
    ask_for_huge_pages(area, skip, (size + lead) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return area, skip + lead
