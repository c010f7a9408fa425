"""Read parts of a file into memory, from the page cache or past it with ``O_DIRECT``.

A part of a file that is in the page cache is copied from there. Any other part is read with
``O_DIRECT``. Such a read is faster than one through the page cache, and adds no page that counts as
memory of the process's cgroup. One read can fill several targets that are adjacent in the file. If
the file system refuses ``O_DIRECT``, the file is read through the page cache, and each page is
dropped from the page cache after its read.
"""

import ctypes
import mmap
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Final

from weighin.loader.mapped_copy import make_present
from weighin.loader.open_file import LARGEST_ALIGNMENT, OpenedFile
from weighin.loader.vectored import ALIGNMENT, address_of, gather, up

PIECE_BYTES: Final = 1024**2
"""The size in bytes of a read through a buffer. With reads of 1 MiB, a disk nearly reaches its full
rate, and 1 MiB fits into a processor's cache.
"""

DISK_THREADS: Final = 16
"""The number of threads that read from a local disk. 16 threads keep the disk busy even while some of
them convert values or wait for a small read."""

COPIED_BYTES: Final = 192 * 1024**2
"""The size in bytes from which glibc's memcpy bypasses the processor's caches, so that it need not first
read the target. glibc does so for copies of more than 3/4 of a thread's share of the largest cache."""

BUFFER_BYTES: Final = PIECE_BYTES + 2 * ALIGNMENT
"""The size in bytes of a reader's own buffer: a piece, and one page before and one after it, because a
direct read begins and ends at a page."""

MOST_UNUSED_BYTES: Final = 4096
"""The largest gap, in bytes of the file, between two targets that one call of ``scatter`` fills."""

_NEARLY_CACHED: Final = 15 / 16
"""The share of a read's pages that must be cached so that a read through the page cache is faster than
a direct read. A read through the page cache reads only the missing pages from the disk."""

LARGEST_ELEMENT_BYTES: Final = 8
"""The size in bytes of the largest element that can be converted to another dtype."""

_unused: Final = memoryview(bytearray(MOST_UNUSED_BYTES))  # receives gaps from all threads


class PieceReader:
    """Reads pieces of files on one thread, with one open file at a time and one buffer.

    If the file is too short or its disk fails, a read raises a CheckpointError that names the file.

    Args:
        buffer: page-aligned memory for reads. By default the reader maps a buffer of its own. This
            buffer takes RAM, for ``piece_bytes`` and two pages, only after a read has used it.
        piece_bytes: the largest size of a read into the reader's own buffer.
    """

    def __init__(self, buffer: memoryview | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self._file: OpenedFile | None = None
        room = piece_bytes + 2 * LARGEST_ALIGNMENT  # address space, not RAM
        self._bounce = buffer or memoryview(mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE))

    def read(self, file: Path, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on, by one system call if possible."""
        self.read_together(file, [(target, offset)])

    def read_together(self, file: Path, places: Sequence[tuple[memoryview, int]]) -> None:
        """Fill targets that are adjacent in the file; ``places`` has each target's offset in the file."""
        opened = self.opened(file)
        (_, start), (last, at) = places[0], places[-1]
        if opened.cached_share(start, at + len(last) - start) >= _NEARLY_CACHED:
            _copy_all_cached(opened, places)
        elif not self._read_at_once(opened, places):
            for target, offset in places:
                self._read_alone(opened, target, offset)

    @property
    def piece_bytes(self) -> int:
        """The largest number of bytes that one call of ``piece`` can read."""
        return len(self._bounce) - 2 * LARGEST_ALIGNMENT

    def piece(self, file: Path, offset: int, size: int) -> memoryview:
        """Read ``size`` bytes from ``offset`` on, at most ``piece_bytes``, into the reader's buffer.

        The next read overwrites the returned bytes. Their address is a multiple of 8.
        """
        opened = self.opened(file)
        piece = self._bounce[:size]
        if opened.is_cached(offset, size):
            opened.read_cached([piece], offset)
        elif (direct := self._read_around_cache(opened, offset, size)) is None:
            opened.read_and_drop(piece, offset)
        elif offset % LARGEST_ELEMENT_BYTES:
            copy(piece, direct)  # source and target overlap, which memmove allows
        else:
            piece = direct
        return piece

    def scatter(self, file: Path, places: Sequence[tuple[int, int, int]]) -> None:
        """Fill small targets by one read.

        Args:
            places: (offset in the file, address, size) of at most 500 targets in the file's order.
                The gaps between targets have at most ``MOST_UNUSED_BYTES``. All targets lie within
                ``piece_bytes`` of the file.
        """
        opened, start = self.opened(file), places[0][0]
        size = places[-1][0] + places[-1][2] - start
        if opened.is_cached(start, size) and opened.read_scattered(_buffers(places), start, size):
            return
        content = address_of(self.piece(file, start, size)) - start
        for offset, address, length in places:
            ctypes.memmove(address, content + offset, length)

    def opened(self, file: Path) -> OpenedFile:
        """Return ``file`` opened; if the reader has another file open, close that file first."""
        if not self._file or file != self._file.path:
            self.close()
            self._file = OpenedFile(file)
        return self._file

    def close(self) -> None:
        """Close the open file. The buffer's memory is freed when nothing refers to the buffer."""
        if self._file:
            self._file.close()
        self._file = None

    def _read_alone(self, opened: OpenedFile, target: memoryview, offset: int) -> None:
        """Fill one target by reads of ``PIECE_BYTES``, as long as cached or direct reads work."""
        for start in range(0, len(target), PIECE_BYTES):
            part, at = target[start : start + PIECE_BYTES], offset + start
            if opened.is_cached(at, len(part)):
                opened.read_cached([part], at)
            elif not self._read_at_once(opened, [(part, at)]):
                # Read the whole rest: the kernel's read-ahead makes the next part look cached.
                opened.read_and_drop(target[start:], at)
                return

    def _read_at_once(self, opened: OpenedFile, places: Sequence[tuple[memoryview, int]]) -> bool:
        """Fill targets by one direct read; return False if it is refused or the buffer is too small."""
        room = self._bounce[: self.piece_bytes + 2 * opened.alignment]
        gathered = gather(places, room, opened.alignment) if opened.direct else None
        if gathered is None:
            return False
        if not opened.read_direct(gathered.buffers, gathered.offset, gathered.wanted_bytes):
            return False
        for target, source in gathered.copies:
            copy(target, source)
        return True

    def _read_around_cache(self, opened: OpenedFile, offset: int, size: int) -> memoryview | None:
        """Return bytes read past the page cache; None if the file system refuses ``O_DIRECT``."""
        skip = offset % opened.alignment
        buffer = self._bounce[: up(skip + size, opened.alignment)]
        if not opened.direct or not opened.read_direct([buffer], offset - skip, skip + size):
            return None
        return self._bounce[skip : skip + size]


def _buffers(places: Sequence[tuple[int, int, int]]) -> "array[int]":
    """Return the address and size of each target, and of the unused buffer for each gap between targets."""
    unused = address_of(_unused)
    buffers = array("Q")
    end = places[0][0]
    for offset, address, size in places:
        if offset > end:
            buffers.extend((unused, offset - end))
        buffers.extend((address, size))
        end = offset + size
    return buffers


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL, which a slice assignment would hold."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


@cache
def copies_by_mapping(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether memcpy from a mapping copies cached pages faster than ``read()`` on this processor.

    A large memcpy of glibc bypasses the caches of an x86 processor. For ``read()``, the kernel copies
    with the instruction ``rep movsb`` if the processor has the flag ``fsrm``. ``rep movsb`` is faster
    than memcpy on an AMD EPYC, and slower on an Intel Xeon (measured by ``benchmarks/copying.py``).
    """
    try:
        with cpuinfo.open() as lines:
            first = takewhile(str.strip, lines)  # the lines of the first processor
            parted = [line.partition(":") for line in first]
    except OSError:
        return False
    properties = {name.strip(): value.split() for name, _, value in parted}
    if properties.get("vendor_id") == ["AuthenticAMD"]:
        return "fsrm" not in properties.get("flags", [])
    return properties.get("vendor_id") == ["GenuineIntel"]


def _copy_all_cached(opened: OpenedFile, places: Sequence[tuple[memoryview, int]]) -> None:
    """Fill targets from the page cache, by one system call for smaller targets that adjoin in the file."""
    group: list[memoryview] = []
    start = end = places[0][1]
    for target, offset in places:
        if len(target) >= COPIED_BYTES or offset != end:
            opened.read_cached(group, start)
            group, start = [], offset
        if len(target) >= COPIED_BYTES:
            _copy_cached(opened, target, offset)
            start += len(target)
        else:
            group.append(target)
        end = offset + len(target)
    opened.read_cached(group, start)


def _copy_cached(opened: OpenedFile, target: memoryview, offset: int) -> None:
    """Fill a target from the page cache: by memcpy from a mapping where that is faster, else ``read()``."""
    if len(target) < COPIED_BYTES or not copies_by_mapping():
        opened.read_cached([target], offset)
        return
    make_present(target)
    with opened.looking(offset, len(target)) as mapped:
        copy(target, mapped)
