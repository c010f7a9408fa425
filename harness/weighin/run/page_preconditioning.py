"""Touch memory before a load and free it as the load begins, so that load times vary less.

In a virtual machine whose free pages are reported to the host (free page reporting, balloons), a
page that was free for a while takes three times as long to get as one that was freed just now.
Memory figures do not depend on this; times do. Linux reports all free pages 2 s after a page became
free. So the memory is held until no report is due; a load that then begins has 2 s of fast pages.
"""

import ctypes
import mmap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.probes import environment

SETTLED_S = 2.5  # if no memory was freed in between, no report is due any more
_LARGEST_SHARE = 0.8  # of the memory that is free now: more could evict other programs


def touch_and_free(wanted_bytes: int) -> int:
    """Write to fresh memory and free it; returns its size in bytes.

    The size is less than ``wanted_bytes`` if the machine has too little free memory. Takes about
    0.1 s per GiB, and several times that where the pages were reported to the host.
    """
    with held(wanted_bytes) as size:
        return size


@contextmanager
def held(wanted_bytes: int, spare_bytes: int = 0) -> Iterator[int]:
    """Hold touched memory until the end of the block; yields its size in bytes.

    Args:
        wanted_bytes: the size, if the machine has as much to spare.
        spare_bytes: memory to leave free, for the worker until the end of the block.
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
        finally:  # the mapping cannot be closed while a pointer into it exists, on Ctrl-C either
            del start
        yield size


def give_back(memory: ExitStack) -> None:
    """Free the ``held`` memory, once no report of free pages is due any more."""
    time.sleep(SETTLED_S)
    memory.close()
