"""Drop a checkpoint's pages from the page cache, and count the pages that remain.

The kernel charges a page to the cgroup that read it first, so a RAM limit does not cover a checkpoint that
was cached before. Only who owns a file or may write to it can count its cached pages: for others, cachestat
fails (since Linux 6.15), and mincore reports every page as resident (since Linux 5.2).
"""

import ctypes
import mmap
import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from weighin.units import GIB

_SYS_CACHESTAT = 451  # the same syscall number on every architecture; Linux 6.5
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p


def drop(files: Iterable[Path]) -> int | None:
    """Write back and drop the cached pages of ``files``, for 0.1 s, because a page that is mapped or in a per-CPU
    batch survives the first attempt. Return the bytes that remain (a tmpfs keeps its pages); None if unknown.
    """
    left = {file: _cached_bytes(file, drops=True) for file in files}
    deadline = time.monotonic() + 0.1
    while any(left.values()) and time.monotonic() <= deadline:
        time.sleep(0.005)
        left |= {file: _cached_bytes(file, drops=True) for file, size in left.items() if size}
    return _sum(left.values())


def cached(files: Iterable[Path]) -> int | None:
    return _sum([_cached_bytes(file) for file in files])


def cached_share(descriptor: int, offset: int, length: int) -> float:
    """Return the cached share of a range's pages, from 0 to 1; 0 if unknown. RWF_NOWAIT would start read-ahead."""
    start = offset - offset % mmap.PAGESIZE
    length += offset - start
    pages = _cached_pages(descriptor, start, length)
    return 0.0 if pages is None else min(1.0, pages / max(-(-length // mmap.PAGESIZE), 1))


def _cached_bytes(file: Path, *, drops: bool = False) -> int | None:
    with file.open("rb", buffering=0) as opened:
        if drops:
            os.fsync(opened)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = _cached_pages(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
        return None if pages is None else pages * mmap.PAGESIZE


def _sum(sizes: Collection[int | None]) -> int | None:
    return None if None in sizes else sum(size or 0 for size in sizes)


def _cached_pages(descriptor: int, start: int, length: int) -> int | None:
    if length <= 0:
        return 0
    # cachestat gets an offset and a length, and returns five numbers: the first is that of the cached pages.
    counts, stretch = (ctypes.c_uint64 * 5)(), (ctypes.c_uint64 * 2)(start, length)
    failed = _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), descriptor, stretch, counts, 0)
    return _mincore_pages(descriptor, start, length) if failed else counts[0]


def _mincore_pages(descriptor: int, start: int, length: int) -> int | None:
    """Return what cachestat does, in 100 times its time."""
    # Without permission, mincore reports even a page far behind the file's end as resident.
    behind = (os.fstat(descriptor).st_size // GIB + 2) * GIB
    if start != behind and _mincore_pages(descriptor, behind, 1) != 0:
        return None
    residency, size = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))(), ctypes.c_size_t(length)
    # Python's mmap refuses a range behind the file's end.
    found = _libc.mmap(
        None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, ctypes.c_int64(start)
    )
    if (address := ctypes.c_void_p(found)).value == ctypes.c_void_p(-1).value:
        return None
    failed = _libc.mincore(address, size, residency)
    _libc.munmap(address, size)
    return None if failed else bytes(residency).count(b"\x01")


def ask_for_huge_pages(area: mmap.mmap, start: int, size: int) -> None:
    with suppress(AttributeError, OSError):
        area.madvise(mmap.MADV_HUGEPAGE, start, size)
