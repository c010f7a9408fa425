"""Whether a checkpoint's pages are in the page cache, and how to get them out, proven.

A warm cache switches a RAM limit off: pages are charged to whoever read them first. So before a
cold cell they are dropped, and asked for; before a warm one the worker itself reads them.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

_SYS_CACHESTAT = 451  # the same number on every architecture; Linux 6.5
_DROP_ATTEMPTS = 20
_libc = ctypes.CDLL(None, use_errno=True)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("nr_cache", "nr_dirty", "nr_writeback", "nr_evicted", "nr_recently_evicted")
    )


def drop(files: Iterable[Path]) -> int:
    """Write back and drop the cached pages of ``files``; returns how many bytes are left cached.

    Pages that wait in a processor's batch, or that somebody maps, survive a first try.
    """
    left = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            for _ in range(_DROP_ATTEMPTS):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                remaining = cached_bytes(descriptor)
                if not remaining:
                    break
                time.sleep(0.005)
            left += remaining or 0
        finally:
            os.close(descriptor)
    return left


def cached(files: Iterable[Path]) -> int:
    """Return how many bytes of ``files`` are in the page cache."""
    total = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            total += cached_bytes(descriptor)
        finally:
            os.close(descriptor)
    return total


def cached_bytes(descriptor: int) -> int:
    """Return how many bytes of an open file are in the page cache.

    Asks cachestat, and where that is missing or refused (Linux before 6.5, older seccomp
    profiles), mincore. mincore calls every page of a file resident that the caller neither owns
    nor may write (Linux 5.2): a file that cannot be proven cold then counts as cached.
    """
    pages = _cached_pages(descriptor, 0, os.fstat(descriptor).st_size)
    return pages * mmap.PAGESIZE


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Tell whether every byte of a stretch of an open file is in the page cache.

    Asks as ``cached_bytes`` does. Never by a read with RWF_NOWAIT: that begins to read ahead.
    """
    start = offset - offset % mmap.PAGESIZE
    length += offset - start
    return _cached_pages(descriptor, start, length) >= -(-length // mmap.PAGESIZE)


def _cached_pages(descriptor: int, start: int, length: int) -> int:
    if length <= 0:
        return 0
    if (pages := _cachestat_pages(descriptor, start, length)) is None:
        pages = _mincore_pages(descriptor, start, length)
    return pages


def _cachestat_pages(descriptor: int, start: int, length: int) -> int | None:
    stretch, found = _CachestatRange(start, length), _Cachestat()
    failed = _libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT), descriptor, ctypes.byref(stretch), ctypes.byref(found), 0
    )
    return None if failed else int(found.nr_cache)


def _mincore_pages(descriptor: int, start: int, length: int) -> int:
    residency = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    # PROT_WRITE on a private mapping: ctypes takes the address of writable buffers only.
    with mmap.mmap(
        descriptor,
        length,
        flags=mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=start,
    ) as area:
        first = ctypes.c_char.from_buffer(area)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = _libc.mincore(address, ctypes.c_size_t(length), residency)
        error = ctypes.get_errno()
        del first  # the mapping cannot be closed while a pointer into it lives
    if failed:
        raise OSError(error, os.strerror(error))
    return bytes(residency).count(b"\x01")
