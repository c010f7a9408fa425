"""How a file wants to be read past the page cache: at which multiples, in it and in memory."""

import ctypes
import math
from typing import Final

from weighin.loader.vectored import ALIGNMENT

LARGEST_ALIGNMENT: Final = 64 * 1024
"""For which a reader has room: of what is known, file systems with blocks of 64 KiB ask for the most."""

_AT_EMPTY_PATH: Final = 0x1000  # linux/fcntl.h
_STATX_DIOALIGN: Final = 0x2000  # linux/stat.h; Linux 6.1

_libc = ctypes.CDLL(None)


class _Statx(ctypes.Structure):
    """Of linux/stat.h, as far as it is read."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("others", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


def alignment_of(descriptor: int) -> int:
    """Return the alignment to read an open file with, in bytes; 0 where it must go through the cache.

    ``ALIGNMENT``, or a multiple of it, which also is what the kernel is not asked for, or does not
    tell: then a read tells.
    """
    found = _Statx()
    statx = getattr(_libc, "statx", None)  # glibc 2.28, musl 1.2.5
    if statx is None:
        return ALIGNMENT
    failed = statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(found))
    if failed or not found.mask & _STATX_DIOALIGN:
        return ALIGNMENT
    if not found.dio_offset_align or ALIGNMENT % max(1, found.dio_mem_align):
        return 0
    alignment = math.lcm(ALIGNMENT, found.dio_offset_align)
    return alignment if alignment <= LARGEST_ALIGNMENT else 0
