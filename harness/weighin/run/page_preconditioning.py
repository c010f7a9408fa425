"""Touch memory before a load and free it as the load begins, so that load times vary less.

Some virtual machines report free pages to their host (free page reporting, balloons). In such a
machine, allocating a page that was free for a while takes three times as long as allocating a page
that was freed just now. Reports of free pages affect times, not memory figures. Linux reports all
free pages 2 s after a page became free. The parent therefore holds memory until no report is due; a
load that begins when the parent frees this memory gets fast pages for 2 s.
"""

import ctypes
import mmap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.probes import environment

SETTLED_S = 2.5  # after this time without freed memory, no report is due
_LARGEST_SHARE = 0.8  # of the free memory; a larger share could evict pages of other programs


def touch_and_free(wanted_bytes: int) -> int:
    """Write to fresh memory, free it, and return the memory's size in bytes.

    The size is less than ``wanted_bytes`` if the machine has too little free memory. The call takes
    about 0.1 s per GiB, and several times as long for pages that were reported to the host.
    """
    with held(wanted_bytes) as size:
        return size


@contextmanager
def held(wanted_bytes: int, spare_bytes: int = 0) -> Iterator[int]:
    """Hold touched memory until the end of the block, and yield the memory's size in bytes.

    Args:
        wanted_bytes: the size to hold; less is held if the machine has too little free memory.
        spare_bytes: memory to leave free for the worker until the end of the block.
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
        finally:  # on Ctrl-C too: a mapping cannot be closed while a pointer into it exists
            del start
        yield size


def give_back(memory: ExitStack) -> None:
    """Wait until no report of free pages is due, and then free the ``held`` memory."""
    time.sleep(SETTLED_S)
    memory.close()
