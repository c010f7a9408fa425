"""Find the alignment that ``O_DIRECT`` reads of a file need, in the file and in memory."""

import ctypes
import math
from typing import Final

from weighin.loader.vectored import ALIGNMENT

LARGEST_ALIGNMENT: Final = 64 * 1024
"""The largest alignment that a reader's buffer supports, in bytes. File systems with 64 KiB blocks
need it."""

_AT_EMPTY_PATH: Final = 0x1000  # linux/fcntl.h
_STATX_DIOALIGN: Final = 0x2000  # linux/stat.h; Linux 6.1

_libc = ctypes.CDLL(None)


class _Statx(ctypes.Structure):
    """``struct statx`` of linux/stat.h, with only the fields that this module uses."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("others", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


def alignment_of(descriptor: int) -> int:
    """Return the alignment for direct reads of an open file, in bytes; 0 if it allows no direct reads.

    The result is a multiple of ``ALIGNMENT``. If neither the C library nor the kernel reports an
    alignment, the result is ``ALIGNMENT``, and the first read shows whether direct reads work.
    """
    status = _Statx()
    statx = getattr(_libc, "statx", None)  # glibc 2.28, musl 1.2.5
    if statx is None:
        return ALIGNMENT
    failed = statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(status))
    if failed or not status.mask & _STATX_DIOALIGN:
        return ALIGNMENT
    if not status.dio_offset_align or ALIGNMENT % max(1, status.dio_mem_align):
        return 0
    alignment = math.lcm(ALIGNMENT, status.dio_offset_align)
    return alignment if alignment <= LARGEST_ALIGNMENT else 0
