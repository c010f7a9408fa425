"""Takes and gives back memory just before a cell, so that its time does not depend on luck.

A virtual machine whose free pages are reported to the host (free page reporting, balloons) gets a
page that was free for a while three times slower than one that was used just now. Memory figures
do not depend on it; times do.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from harness import environment

_LARGEST_SHARE = 0.8  # of the memory that is free now: more could push others out


def touch_and_free(wanted_bytes: int) -> int:
    """Write to so much fresh memory and free it; returns how much it was, in bytes.

    Less than ``wanted_bytes`` where the machine has not that much to spare. Takes about 0.1 s a
    GiB, and several times that where the pages were reported.
    """
    with held(wanted_bytes) as size:
        return size


@contextmanager
def held(wanted_bytes: int) -> Iterator[int]:
    """Hold so much touched memory until the end of the block; gives how much it is, in bytes.

    A process that allocates right behind the block gets pages that were free for no time at all.
    """
    size = min(wanted_bytes, int(environment.free_ram_bytes() * _LARGEST_SHARE))
    if size <= 0:
        yield 0
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as area:
        area.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.c_char.from_buffer(area)
        try:
            ctypes.memset(ctypes.addressof(start), 1, size)
        finally:  # the mapping cannot be closed while a pointer into it lives: not on Ctrl-C either
            del start
        yield size
