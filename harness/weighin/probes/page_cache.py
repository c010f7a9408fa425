"""Whether a checkpoint's pages are in the page cache, and how to get them out, proven.

A warm cache switches a RAM limit off: pages are charged to whoever read them first. So before a
cold cell they are dropped, and asked for; before a warm one the worker itself reads them.

Linux does not tell everybody. To who neither owns a file nor may write it, cachestat is refused
(Linux 6.15) and mincore calls every page resident (Linux 5.2). That is "not known": None.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

_SYS_CACHESTAT = 451  # the same number on every architecture; Linux 6.5
_DROP_ATTEMPTS = 20
_FAR_BYTES = 1024**3  # no folio of the page cache is larger
_MAP_FAILED = ctypes.c_size_t(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("nr_cache", "nr_dirty", "nr_writeback", "nr_evicted", "nr_recently_evicted")
    )


def drop(files: Iterable[Path]) -> int | None:
    """Write back and drop the cached pages of ``files``; returns how many bytes are left cached.

    Pages that wait in a processor's batch, or that somebody maps, survive a first try. None where
    it is not known of one of the files: all that can be dropped is, and nothing is proven.
    """
    return _sum(map(_drop, files))


def cached(files: Iterable[Path]) -> int | None:
    """Return how many bytes of ``files`` are in the page cache; None where that is not known."""
    return _sum(map(_cached, files))


def cached_bytes(descriptor: int) -> int | None:
    """Return how many bytes of an open file are in the page cache; None where that is not known."""
    pages = _cached_pages(descriptor, 0, os.fstat(descriptor).st_size)
    return None if pages is None else pages * mmap.PAGESIZE


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Tell whether every byte of a stretch of an open file is in the page cache, and that is known.

    Never asks by a read with RWF_NOWAIT: that begins to read ahead.
    """
    start = offset - offset % mmap.PAGESIZE
    length += offset - start
    pages = _cached_pages(descriptor, start, length)
    return pages is not None and pages >= -(-length // mmap.PAGESIZE)


def _drop(file: Path) -> int | None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        for _ in range(_DROP_ATTEMPTS):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if not (remaining := cached_bytes(descriptor)):
                break
            time.sleep(0.005)
        return remaining
    finally:
        os.close(descriptor)


def _cached(file: Path) -> int | None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return cached_bytes(descriptor)
    finally:
        os.close(descriptor)


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of all sizes, each of which is asked for; None where one is not known."""
    known = True
    total = 0
    for size in sizes:
        known = known and size is not None
        total += size or 0
    return total if known else None


def _cached_pages(descriptor: int, start: int, length: int) -> int | None:
    if length <= 0:
        return 0
    if (pages := _cachestat_pages(descriptor, start, length)) is None:
        pages = _mincore_pages(descriptor, start, length)
    return pages


def _cachestat_pages(descriptor: int, start: int, length: int) -> int | None:
    """Return how many pages cachestat counts; None before Linux 6.5, and where it is refused."""
    stretch, found = _CachestatRange(start, length), _Cachestat()
    failed = _libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT), descriptor, ctypes.byref(stretch), ctypes.byref(found), 0
    )
    return None if failed else int(found.nr_cache)


def _mincore_pages(descriptor: int, start: int, length: int) -> int | None:
    """Return how many pages mincore counts; None where it cannot be asked, or does not tell."""
    pages = _mincore(descriptor, start, length)
    if not pages:
        return pages
    # Whoever is not told is told that all is there: a page far behind the file's end, too.
    behind = (os.fstat(descriptor).st_size // _FAR_BYTES + 2) * _FAR_BYTES
    return pages if _mincore(descriptor, behind, mmap.PAGESIZE) == 0 else None


def _mincore(descriptor: int, start: int, length: int) -> int | None:
    residency = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    # Python's mmap refuses what lies behind a file's end.
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, start)
    if address == _MAP_FAILED:
        return None
    failed = _libc.mincore(address, length, residency)
    _libc.munmap(address, length)
    return None if failed else bytes(residency).count(b"\x01")
