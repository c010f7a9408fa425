"""Read parts of a file into memory, from the page cache or past it with ``O_DIRECT``.

A part of a file that is in the page cache is copied from there. Any other part is read with
``O_DIRECT``. Such a read is faster than one through the page cache, and adds no page that counts as
memory of the process's cgroup. One read can fill several targets that are adjacent in the file. If
the file system refuses ``O_DIRECT``, the file is read through the page cache, and each page is
dropped from the page cache after its read.
"""

import ctypes
import mmap
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final, NamedTuple

from weighin.loader.open_file import (
    ALIGNMENT,
    LARGEST_ALIGNMENT,
    OpenedFile,
    down,
    make_present,
    up,
)

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

_LEAST_STRAIGHT_BYTES: Final = 16 * ALIGNMENT  # smaller targets are as fast through the buffer
MOST_THREADS: Final = 64
"""The largest number of threads that read from a disk."""

LATE_NS: Final = 500_000
"""The time in nanoseconds from which a small read, and its disk, count as late. A local disk takes
50,000 to 200,000 ns for a small read."""

_WANTED_BYTES_PER_S: Final = 10**9  # the wanted rate of all threads together
# The buffers of all threads: half as large as for a local disk, because each thread takes memory too.
_LATE_BUFFERS_BYTES: Final = 8 * 1024**2
_SMALL_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 128 * 1024  # one request of FUSE


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


@dataclass(frozen=True, slots=True)
class Gathered:
    """A read of ``wanted_bytes`` at ``offset`` of a file, which fills ``buffers`` one after the other.

    After the read, the ``copies`` must be made in their order. Each copy is (destination, source).
    The destination is a part of a target. The source is in the buffer for small targets, or in the
    same target less than a page away.
    """

    offset: int
    wanted_bytes: int
    buffers: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]


def gather(
    places: Sequence[tuple[memoryview, int]], bounce: memoryview, alignment: int = ALIGNMENT
) -> Gathered | None:
    """Return one read that fills all targets; None if the buffer is too small for this read.

    A direct read transfers whole pages of a file to whole pages of memory. The kernel writes directly
    to the pages that lie wholly in a large target. If a target's offset within a page differs in memory
    and in the file, its bytes are afterwards moved by less than a page. The first and last bytes of a
    target, and small targets, pass through a buffer. One system call reads both direct and buffered
    parts, because a separate small read would have to wait for the large reads before it.

    Args:
        places: the targets with their offsets in the file, in the file's order, without overlaps.
        bounce: the buffer for small targets; it begins at a page boundary.
        alignment: the alignment that direct reads of the file need, in bytes.
    """
    start, stop = down(places[0][1], alignment), up(places[-1][1] + len(places[-1][0]), alignment)
    found = ((place, _straight(place, alignment)) for place in places)
    pages = [(place, straight) for place, straight in found if straight]
    nothing = bounce[:0]
    straights = [(start, start, nothing), *(one for _, one in pages), (stop, stop, nothing)]
    buffers: list[memoryview] = []
    copies = [
        (target[first - offset : last - offset], view)
        for (target, offset), (first, last, view) in pages
        if address_of(view) - address_of(target) != first - offset
    ]
    used = 0
    for (_, first, _), (last, _, view) in pairwise(straights):
        if used + last - first > len(bounce):
            return None
        passing = bounce[used : used + last - first]
        used += last - first
        buffers += [buffer for buffer in (passing, view) if len(buffer)]
        for target, offset in places:
            low, high = max(first, offset), min(last, offset + len(target))
            if low < high:
                copies.append(
                    (target[low - offset : high - offset], passing[low - first : high - first])
                )
    return Gathered(start, places[-1][1] + len(places[-1][0]) - start, buffers, copies)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _straight(place: tuple[memoryview, int], alignment: int) -> tuple[int, int, memoryview] | None:
    """Return (start, end, memory): a range of the file, and the part of a target to read it into.

    The memory consists of whole pages of the target, and lies less than one page from where the bytes
    belong. ``_straight`` returns None if the range has less than 64 KiB.
    """
    target, offset = place
    first, page = up(offset, alignment), -address_of(target) % alignment
    last = min(down(offset + len(target), alignment), first + down(len(target) - page, alignment))
    if last - first < _LEAST_STRAIGHT_BYTES:
        return None
    return first, last, target[page : page + last - first]


@dataclass(frozen=True, slots=True)
class Readers:
    """The number of threads that read from a disk, and the size of their reads.

    Attributes:
        piece_bytes: the size of each thread's buffer.
        late: whether a small read takes 0.5 ms or more. If so, no read is larger than ``piece_bytes``.
    """

    threads: int
    piece_bytes: int = PIECE_BYTES
    late: bool = False


class TimedRead(NamedTuple):
    """The size and the duration of a read that ran alone."""

    nbytes: int
    ns: int


def choose(reads: Sequence[TimedRead]) -> Readers:
    """Return the number of threads and the size of reads for a disk, from the times of the first reads.

    A local disk answers a small read within 0.2 ms, and is fastest with few, large reads. Storage behind
    a network answers after some milliseconds. A FUSE mount divides a large read into requests of 128
    KiB, and makes these one after the other, so that up to 64 threads must read at the same time. The
    reads from a disk with a high latency are small, because the load ends only when the last read ends.

    The disk's latency is the time of the quickest read, because any one read may be late by chance.
    The rate of the largest read is the rate that one thread can reach.
    """
    if min(read.ns for read in reads) < LATE_NS:
        return Readers(DISK_THREADS)
    nbytes, ns = max(reads)
    threads = DISK_THREADS
    while threads < MOST_THREADS and threads * nbytes * 1e9 < _WANTED_BYTES_PER_S * ns:
        threads *= 2
    return Readers(threads, _LATE_BUFFERS_BYTES // threads - 2 * ALIGNMENT, late=True)


class DiskReaders:
    """The number of threads and the size of reads of one load, from its first reads of a disk.

    Args:
        threads: the number of threads; None chooses it from the disk's latency. With one thread, the
            latency is not measured, and the reads are those for a local disk.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._readers: Readers | None = None

    def of(self, reader: PieceReader, file: Path, offset: int, size: int) -> Readers:
        """Return the number of threads and the size of their reads.

        The first call with at least 128 KiB measures the disk's latency, unless ``threads`` is 1.
        """
        if self._readers is None:
            if self.threads == 1 or size < _SAMPLE_BYTES:
                return Readers(self.threads or DISK_THREADS)
            middle = down(offset + (size - _SAMPLE_BYTES) // 2, ALIGNMENT)
            chosen = choose(list(first_reads(reader, file, middle)))
            self._readers = replace(chosen, threads=self.threads or chosen.threads)
        return self._readers


def first_reads(reader: PieceReader, file: Path, offset: int) -> Iterator[TimedRead]:
    """Time a read of 4 KiB and, if this read takes 0.5 ms or more, a read of 128 KiB."""
    reader.opened(file)  # before the clock starts
    for size in (_SMALL_BYTES, _SAMPLE_BYTES):
        start = time.monotonic_ns()
        reader.piece(file, offset, size)
        elapsed_ns = time.monotonic_ns() - start
        yield TimedRead(size, elapsed_ns)
        if elapsed_ns < LATE_NS:
            return
