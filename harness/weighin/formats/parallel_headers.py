"""Read a checkpoint's many headers at the same time from a disk that answers each read late.

Storage behind a network answers each read after some milliseconds. On such storage, hundreds of
headers that are read one after the other take seconds. If the storage is mounted by FUSE, the
kernel's read-ahead helps little: FUSE sends at most 12 read-ahead requests at a time.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

LATE_S: Final = 0.002
"""A disk counts as late if reading and parsing a part of a file takes this many seconds or more."""

_THREADS: Final = 128
_BLOCK_BYTES: Final = 64 * 1024  # one read takes all headers in a block of this size

Item = TypeVar("Item")
Value = TypeVar("Value")


def is_late(start_s: float) -> bool:
    """Tell whether ``LATE_S`` have passed since a read began at ``start_s`` (``time.monotonic``)."""
    return time.monotonic() - start_s >= LATE_S


def map_files(function: Callable[[Item], Value], items: Sequence[Item]) -> Iterator[Value]:
    """Yield the function's value for each item; ``function`` reads one file for each item.

    If the disk answers the first read late, threads read the other files at the same time. The
    iteration ends at the first error, in the order of the items.
    """
    if not items:
        return
    start = time.monotonic()
    yield function(items[0])
    if not is_late(start):
        yield from map(function, items[1:])
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        # Each thread gets a context, so that ``foreign.remembering`` holds in it, too.
        contexts = [copy_context() for _ in items[1:]]
        yield from pool.map(lambda context, item: context.run(function, item), contexts, items[1:])


def read_headers(path: Path, places: Iterable[int], size: int) -> dict[int, bytes]:
    """Return ``size`` bytes at each offset in ``places``, or fewer at the file's end.

    An offset whose bytes cannot be read is left out. The reads bypass the page cache if the file system
    allows that. ``size`` must be at most the size of a page.
    """
    blocks: dict[int, list[int]] = {}
    for at in places:
        blocks.setdefault(at // _BLOCK_BYTES * _BLOCK_BYTES, []).append(at)
    try:
        file = _opened(path)
    except OSError:
        return {}
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(partial(_read_block, file, size), blocks.items())
            return {at: header for headers in found for at, header in headers.items()}
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # tmpfs, some network file systems
        return os.open(path, os.O_RDONLY)


def _read_block(file: int, size: int, block: tuple[int, list[int]]) -> dict[int, bytes]:
    start, places = block
    with mmap.mmap(-1, _BLOCK_BYTES + mmap.PAGESIZE) as buffer:  # aligned, as direct reads need
        try:
            length = os.preadv(file, [buffer], start)
        except OSError:
            return {}
        return {at: buffer[at - start : min(at - start + size, length)] for at in places}
