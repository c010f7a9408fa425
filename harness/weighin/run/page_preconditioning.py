"""Fill free memory before a load, and release it as the load begins, so that load times vary less.

Some virtual machines report a free page to their host after 2 s (free page reporting, balloons).
The host must provide a reported page again, so that the page's allocation takes three times as
long. weighin therefore holds memory until no report is due, and frees the memory as the load
begins. For 2 s, the load then gets unreported pages. The held memory changes no memory figure of
the load.
"""

import ctypes
import mmap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.probes import environment

SETTLED_S = 2.5  # no report is due if no memory was freed for this time
_LARGEST_SHARE = 0.8  # of the free memory, because more could evict pages of other programs


def touch_and_free(wanted_bytes: int) -> int:
    """Write to fresh memory, free it, and return the memory's size in bytes.

    The size is smaller than ``wanted_bytes`` if the machine has too little free memory. The call
    takes about 0.1 s per GiB, and several times as long for pages that were reported to the host.
    """
    with held(wanted_bytes) as size:
        return size


@contextmanager
def held(wanted_bytes: int, spare_bytes: int = 0) -> Iterator[int]:
    """Write to fresh memory, keep it until the end of the block, and yield its size in bytes.

    The size is at most ``wanted_bytes``. At least ``spare_bytes`` of memory remain free.
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
        finally:  # also after Ctrl-C: Python refuses to unmap memory that has a pointer into it
            del start
        yield size


def give_back(memory: ExitStack) -> None:
    """Wait until no report of free pages is due, and then free the memory of ``held``."""
    time.sleep(SETTLED_S)
    memory.close()
