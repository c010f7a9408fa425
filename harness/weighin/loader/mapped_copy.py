"""Looking at what the page cache holds of a file where it lies there; and pages to copy it to."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

WINDOW_BYTES: Final = 16 * 1024**2
"""How much is looked at at once: giving pages back costs every processor an interruption."""

_MADV_POPULATE_READ: Final = 22  # linux/mman.h; Linux 5.14
_MADV_POPULATE_WRITE: Final = 23
_POPULATED_BYTES: Final = 16 * 1024**2  # at once: nobody else can map anything meanwhile
_MAP_FAILED: Final = ctypes.c_size_t(-1).value

# By ctypes, which lets other threads run meanwhile; Python's own mmap does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Window:
    """A map of a whole file of which only what is looked at takes memory, file-backed."""

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
        """Give the bytes at ``offset``, to be read only, for as long as the context lasts.

        Who cuts the file short meanwhile ends this process with SIGBUS, as with any map.

        Raises:
            EOFError: the file ends before.
        """
        if offset + size > self._size:
            raise EOFError
        start = self._address + offset - offset % mmap.PAGESIZE
        length = self._address + offset + size - start
        # All pages at once; an older kernel, which refuses, brings them as they are touched.
        if _libc.madvise(start, length, _MADV_POPULATE_READ) and ctypes.get_errno() == errno.EFAULT:
            raise EOFError  # it became shorter
        try:
            yield memoryview((ctypes.c_ubyte * size).from_address(self._address + offset))
        finally:
            # The whole map: the kernel may have brought neighbours, which lie in the same huge page.
            _libc.madvise(self._address, self._size, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Take the map down: nothing may look at it any more."""
        if self._address != _MAP_FAILED:
            _libc.munmap(self._address, self._size)
            self._address = _MAP_FAILED


def ask_for_huge_pages(area: mmap.mmap, start: int, size: int) -> None:
    """Ask the kernel for huge pages in a stretch of a mapping; one that was built without them has none."""
    with suppress(AttributeError, OSError):
        area.madvise(mmap.MADV_HUGEPAGE, start, size)


def make_present(memory: memoryview) -> None:
    """Have all pages of anonymous memory there, cleared, before they are written to.

    Whoever clears them in the middle of a copy slows it down. An older kernel refuses, and does.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, end = address - address % mmap.PAGESIZE, address + len(memory)
    for start in range(first, end, _POPULATED_BYTES):
        length = min(_POPULATED_BYTES, end - start)
        if _libc.madvise(start, length, _MADV_POPULATE_WRITE):
            return
