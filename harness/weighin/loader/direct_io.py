"""Read parts of a file into memory, from the page cache or past it with ``O_DIRECT``.

A piece that is in the page cache is copied from there. Any other piece is read with ``O_DIRECT``,
which is faster than filling the cache and adds no page that the kernel charges to the process's
cgroup. Adjacent targets are filled by one read (``vectored``). If the file system refuses
``O_DIRECT``, the file is read through the page cache, and the pages already read are dropped from it.
"""

import ctypes
import mmap
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Final

from weighin.loader.alignment import LARGEST_ALIGNMENT
from weighin.loader.mapped_copy import make_present
from weighin.loader.open_file import OpenedFile
from weighin.loader.vectored import ALIGNMENT, address_of, gather, up

PIECE_BYTES: Final = 1024**2
"""The size of a read through a buffer: efficient for a disk, and small enough for a processor's cache."""

DISK_THREADS: Final = 16
"""The number of threads that read from the disk: while some threads convert, or wait for a small
read, the other threads keep the disk busy."""

COPIED_BYTES: Final = 192 * 1024**2
"""The size in bytes from which a copy from the page cache bypasses the processor's caches. glibc's
memcpy writes without first reading the target if the copy is larger than 3/4 of a thread's share of
the largest cache."""

BUFFER_BYTES: Final = PIECE_BYTES + 2 * ALIGNMENT
"""The size of a reader's own buffer: a piece, and the bytes that alignment adds before and after it."""

MOST_UNUSED_BYTES: Final = 4096
"""The largest gap between two targets that one scattered read fills, in bytes."""

_NEARLY_CACHED: Final = 15 / 16
"""The share of a read's pages that must be cached so that a read through the page cache is faster
than a read past it. The kernel may have reclaimed single pages of a cached file; a read through the
cache reads only those pages from the disk."""

LARGEST_ELEMENT_BYTES: Final = 8
"""The size in bytes of the largest element that can be converted to another dtype."""

_unused: Final = memoryview(bytearray(MOST_UNUSED_BYTES))  # receives gaps from all threads


class PieceReader:
    """Reads pieces of files on one thread, with one open file at a time and one buffer.

    Each read raises a CheckpointError that names the file if the file is too short or its disk fails.

    Args:
        buffer: page-aligned memory to use. By default the reader has a buffer of its own, which
            takes ``piece_bytes`` of RAM, and two pages, from the first read that needs it.
    """

    def __init__(self, buffer: memoryview | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self._file: OpenedFile | None = None
        room = piece_bytes + 2 * LARGEST_ALIGNMENT  # address space, not RAM
        self._bounce = buffer or memoryview(mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE))

    def read(self, file: Path, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the file's bytes at ``offset``, in one read where possible."""
        self.read_together(file, [(target, offset)])

    def read_together(self, file: Path, places: Sequence[tuple[memoryview, int]]) -> None:
        """Fill targets that are adjacent in the file; ``places`` has them with their offsets."""
        opened = self._open(file)
        (_, start), (last, at) = places[0], places[-1]
        if opened.cached_share(start, at + len(last) - start) >= _NEARLY_CACHED:
            _copy_all_cached(opened, places)
        elif not self._read_at_once(opened, places):
            for target, offset in places:
                self._read_alone(opened, target, offset)

    @property
    def piece_bytes(self) -> int:
        """The largest size of a piece, in bytes."""
        return len(self._bounce) - 2 * LARGEST_ALIGNMENT

    def piece(self, file: Path, offset: int, size: int) -> memoryview:
        """Return ``size`` bytes of the file, at most ``piece_bytes``, in the reader's buffer.

        The result is valid until the next read. Its address is a multiple of 8 for every
        ``offset``.
        """
        opened = self._open(file)
        piece = self._bounce[:size]
        if opened.is_cached(offset, size):
            opened.read_cached(piece, offset)
        elif (direct := self._read_around_cache(opened, offset, size)) is None:
            opened.read_and_drop(piece, offset)
        elif offset % LARGEST_ELEMENT_BYTES:
            copy(piece, direct)  # towards the front: memmove allows the overlap
        else:
            piece = direct
        return piece

    def scatter(self, file: Path, places: Sequence[tuple[int, int, int]]) -> None:
        """Fill small targets by one read; each has its offset in the file, its address and its size.

        Args:
            places: in the file's order, with gaps of at most ``MOST_UNUSED_BYTES``, at most 500, and
                together at most ``piece_bytes``.
        """
        opened, start = self._open(file), places[0][0]
        size = places[-1][0] + places[-1][2] - start
        if opened.is_cached(start, size) and opened.read_scattered(_buffers(places), start, size):
            return
        content = address_of(self.piece(file, start, size)) - start
        for offset, address, length in places:
            ctypes.memmove(address, content + offset, length)

    def is_cached(self, file: Path, offset: int, size: int) -> bool:
        """Tell whether all of this range is known to be in the page cache."""
        return self._open(file).is_cached(offset, size)

    def cached_share(self, file: Path, offset: int, size: int) -> float:
        """Return the share of this range that is known to be in the page cache, from 0 to 1."""
        return self._open(file).cached_share(offset, size)

    @contextmanager
    def looking(self, file: Path, offset: int, size: int) -> Iterator[memoryview]:
        """Map at most ``WINDOW_BYTES`` of cached pages, read-only, until the context exits."""
        with self._open(file).looking(offset, size) as mapped:
            yield mapped

    def close(self) -> None:
        """Close the open file. The buffer is freed with the last reference to it."""
        if self._file:
            self._file.close()
        self._file = None

    def _open(self, file: Path) -> OpenedFile:
        if not self._file or file != self._file.path:
            self.close()
            self._file = OpenedFile(file)
        return self._file

    def _read_alone(self, opened: OpenedFile, target: memoryview, offset: int) -> None:
        """Fill one target in pieces."""
        for start in range(0, len(target), PIECE_BYTES):
            part, at = target[start : start + PIECE_BYTES], offset + start
            if opened.is_cached(at, len(part)):
                opened.read_cached(part, at)
            elif not self._read_at_once(opened, [(part, at)]):
                # The whole rest: the kernel's read-ahead would make the next part look cached.
                opened.read_and_drop(target[start:], at)
                return

    def _read_at_once(self, opened: OpenedFile, places: Sequence[tuple[memoryview, int]]) -> bool:
        """Read past the page cache; return False if this is refused or the buffer too small."""
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
        """Read past the page cache into the buffer; return None if the file system refuses."""
        skip = offset % opened.alignment
        buffer = self._bounce[: up(skip + size, opened.alignment)]
        if not opened.direct or not opened.read_direct([buffer], offset - skip, skip + size):
            return None
        return self._bounce[skip : skip + size]


def _buffers(places: Sequence[tuple[int, int, int]]) -> "array[int]":
    """Return the addresses and sizes of the buffers of a read: the targets, and the gaps between them."""
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
    """Copy bytes with the GIL released. A slice assignment would hold the GIL."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


@cache
def copies_by_mapping(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether memcpy from a mapping copies cached pages faster than ``read()`` on this processor.

    glibc's memcpy bypasses the caches of an x86 processor. The kernel copies with one instruction
    where the processor has the flag ``fsrm``; that is faster than memcpy on an AMD EPYC, and slower
    on an Intel Xeon (``benchmarks/copying.py``).
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
    """Fill targets from the page cache; one call reads all that lie side by side in the file."""
    group: list[memoryview] = []
    start = end = places[0][1]
    for target, offset in places:
        if len(target) >= COPIED_BYTES or offset != end:
            opened.read_cached_together(group, start)
            group, start = [], offset
        if len(target) >= COPIED_BYTES:
            _copy_cached(opened, target, offset)
            start += len(target)
        else:
            group.append(target)
        end = offset + len(target)
    opened.read_cached_together(group, start)


def _copy_cached(opened: OpenedFile, target: memoryview, offset: int) -> None:
    """Fill a target from the page cache: by ``read()``, or by memcpy from a mapping if that is faster."""
    if len(target) < COPIED_BYTES or not copies_by_mapping():
        opened.read_cached(target, offset)
        return
    make_present(target)
    with opened.looking(offset, len(target)) as mapped:
        copy(target, mapped)
