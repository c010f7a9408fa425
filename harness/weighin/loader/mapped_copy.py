"""Map cached pages of a file for a copy, and populate the pages of the copy's target."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

WINDOW_BYTES: Final = 16 * 1024**2
"""The size in bytes of the parts of a file that are mapped one by one for a conversion. The parts are
large because each unmapping interrupts every processor."""

_MADV_POPULATE_READ: Final = 22  # linux/mman.h; Linux 5.14
_MADV_POPULATE_WRITE: Final = 23
_POPULATED_BYTES: Final = 16 * 1024**2  # in one call, because it blocks mmap of other threads
_MAP_FAILED: Final = ctypes.c_size_t(-1).value

# ctypes releases the GIL during these calls; Python's own mmap does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Window:
    """A mapping of a whole file; only inside ``looking`` are its pages resident (file-backed memory)."""

    def __init__(self, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        self._address: int = _MAP_FAILED
        if self._size:
            self._address = _libc.mmap(
                None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0
            )
            if self._address == _MAP_FAILED:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))

    @contextmanager
    def looking(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes at ``offset``, read-only; they are valid until the context exits.

        If another process truncates the file meanwhile, SIGBUS kills this process, as for any mapping.

        Raises:
            EOFError: the file is too short.
        """
        if offset + size > self._size:
            raise EOFError
        start = self._address + offset - offset % mmap.PAGESIZE
        length = self._address + offset + size - start
        # Maps all pages by one call. Before Linux 5.14 the call fails, and page faults map the pages.
        if _libc.madvise(start, length, _MADV_POPULATE_READ) and ctypes.get_errno() == errno.EFAULT:
            raise EOFError  # the file was truncated
        try:
            yield memoryview((ctypes.c_ubyte * size).from_address(self._address + offset))
        finally:
            # Unmap the whole file: the kernel may have mapped more pages of the same huge page.
            _libc.madvise(self._address, self._size, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file; the caller must no longer use any view of the mapped memory."""
        if self._address != _MAP_FAILED:
            _libc.munmap(self._address, self._size)
            self._address = _MAP_FAILED


def ask_for_huge_pages(area: mmap.mmap, start: int, size: int) -> None:
    """Ask the kernel for huge pages in a part of a mapping; no error if the kernel has none."""
    with suppress(AttributeError, OSError):
        area.madvise(mmap.MADV_HUGEPAGE, start, size)


def make_present(memory: memoryview) -> None:
    """Populate all pages of anonymous memory before a copy, which page faults would slow down.

    ``make_present`` does nothing before Linux 5.14, which introduced ``MADV_POPULATE_WRITE``.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, end = address - address % mmap.PAGESIZE, address + len(memory)
    for start in range(first, end, _POPULATED_BYTES):
        length = min(_POPULATED_BYTES, end - start)
        if _libc.madvise(start, length, _MADV_POPULATE_WRITE):
            return
