"""Takes memory before a load and gives it back as it begins, so that its time does not depend on luck.

A virtual machine whose free pages are reported to the host (free page reporting, balloons) gets a
page that was free for a while three times slower than one that was used just now. Memory figures
do not depend on it; times do. Linux reports 2 s after a page became free, and all that is free then:
so the memory is held until no report is due, and what begins then has 2 s of fast pages.
"""

import ctypes
import mmap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.probes import environment

SETTLED_S = 2.5  # with no memory given back in between, no report is due any more
_LARGEST_SHARE = 0.8  # of the memory that is free now: more could push others out


def touch_and_free(wanted_bytes: int) -> int:
    """Write to so much fresh memory and free it; returns how much it was, in bytes.

    Less than ``wanted_bytes`` where the machine has not that much to spare. Takes about 0.1 s a
    GiB, and several times that where the pages were reported.
    """
    with held(wanted_bytes) as size:
        return size


@contextmanager
def held(wanted_bytes: int, spare_bytes: int = 0) -> Iterator[int]:
    """Hold so much touched memory until the end of the block; gives how much it is, in bytes.

    Args:
        spare_bytes: what others will need before the end of the block, and is left to them.
    """
    free = environment.free_ram_bytes() - spare_bytes
    size = min(wanted_bytes, int(free * _LARGEST_SHARE))
    if size <= 0:
        yield 0
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as area:
        ask_for_huge_pages(area, 0, size)
        start = ctypes.c_char.from_buffer(area)
        try:
            ctypes.memset(ctypes.addressof(start), 1, size)
        finally:  # the mapping cannot be closed while a pointer into it lives: not on Ctrl-C either
            del start
        yield size


def give_back(memory: ExitStack) -> None:
    """Give ``held`` memory back, once no report of free pages is due any more."""
    time.sleep(SETTLED_S)
    memory.close()
