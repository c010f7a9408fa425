"""Reading stretches of a file into memory as fast as the machine allows, whatever is cached.

A piece that the page cache holds is copied from it; any other is read around it with ``O_DIRECT``,
which is faster than filling the cache and leaves no page behind to be charged. What lies one behind
the other is one read. Where memory lies otherwise than the file, it is read beside its place and
moved. Where the file system refuses that, pages are dropped behind the read position.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Final

from weighin.loader.alignment import LARGEST_ALIGNMENT
from weighin.loader.mapped_copy import make_present
from weighin.loader.open_file import OpenedFile
from weighin.loader.vectored import ALIGNMENT, address_of, down, gather, up

PIECE_BYTES: Final = 1024**2
"""How much passes a buffer at once: enough for a disk, small enough for a processor's cache."""

DISK_THREADS: Final = 16
"""How many threads read what is not cached: while some convert, or wait for a few bytes, others keep
the disk busy."""

COPIED_BYTES: Final = 192 * 1024**2
"""As much of the page cache is copied at once, past the processor's caches: glibc's memcpy does not
read first what it overwrites where that is 3/4 of a thread's share of the largest cache, and more."""

BUFFER_BYTES: Final = PIECE_BYTES + 2 * ALIGNMENT
"""What a reader's own buffer takes: a piece, and what aligned reads take before and behind it."""

LARGEST_ELEMENT_BYTES: Final = 8
"""Of what is converted."""

_ROOM_BYTES: Final = PIECE_BYTES + 2 * LARGEST_ALIGNMENT  # memory only where it is touched
_LEAST_MOVED_BYTES: Final = 2 * PIECE_BYTES  # what is less passes the buffer as fast


class PieceReader:
    """Reads pieces of files, on one thread: one file is open at a time, one buffer serves them all.

    Whatever cannot be read is a CheckpointError that names the file: it ends before, or its disk fails.

    Args:
        buffer: page-aligned memory to use; else the reader has its own, which takes ``BUFFER_BYTES``
            once something is read that needs it.
    """

    def __init__(self, buffer: memoryview | None = None) -> None:
        self._file: OpenedFile | None = None
        self._bounce = buffer or memoryview(mmap.mmap(-1, _ROOM_BYTES, flags=mmap.MAP_PRIVATE))

    def read(self, file: Path, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the file's bytes at ``offset``, at once wherever that can be."""
        self.read_together(file, [(target, offset)])

    def read_together(self, file: Path, places: Sequence[tuple[memoryview, int]]) -> None:
        """Fill targets, given with their offsets, that lie one behind the other in the file."""
        opened = self._open(file)
        (_, start), (last, at) = places[0], places[-1]
        if opened.is_cached(start, at + len(last) - start):
            for target, offset in places:
                _copy_cached(opened, target, offset)
        elif not self._read_at_once(opened, places):
            for target, offset in places:
                self._read_alone(opened, target, offset)

    @property
    def piece_bytes(self) -> int:
        """The most bytes that a piece has."""
        return len(self._bounce) - 2 * LARGEST_ALIGNMENT

    def piece(self, file: Path, offset: int, size: int) -> memoryview:
        """Return ``size`` bytes of the file, at most ``piece_bytes``, in the reader's buffer.

        They are good until the next read, and begin at a multiple of 8 wherever they lie in the file.
        """
        opened = self._open(file)
        piece = self._bounce[:size]
        if opened.is_cached(offset, size):
            opened.read_cached(piece, offset)
        elif (found := self._read_around_cache(opened, offset, size)) is None:
            opened.read_and_drop(piece, offset)
        elif offset % LARGEST_ELEMENT_BYTES:
            copy(piece, found)  # towards the front: memmove bears the overlap
        else:
            piece = found
        return piece

    def is_cached(self, file: Path, offset: int, size: int) -> bool:
        """Tell whether the page cache is known to hold all of a stretch."""
        return self._open(file).is_cached(offset, size)

    @contextmanager
    def looking(self, file: Path, offset: int, size: int) -> Iterator[memoryview]:
        """Give what is cached of a file where it lies, to be read only: at most ``WINDOW_BYTES``."""
        with self._open(file).looking(offset, size) as found:
            yield found

    def close(self) -> None:
        """Close the file that is open. The buffer goes when nobody looks at it any more."""
        if self._file:
            self._file.close()
        self._file = None

    def _open(self, file: Path) -> OpenedFile:
        if not self._file or file != self._file.path:
            self.close()
            self._file = OpenedFile(file)
        return self._file

    def _read_alone(self, opened: OpenedFile, target: memoryview, offset: int) -> None:
        """Fill a target in pieces, as far as its bulk cannot be moved into place."""
        moved = self._read_and_move(opened, target, offset)
        for start in range(moved, len(target), PIECE_BYTES):
            part, at = target[start : start + PIECE_BYTES], offset + start
            if opened.is_cached(at, len(part)):
                opened.read_cached(part, at)
            elif not self._read_at_once(opened, [(part, at)]):
                # All: of the next part, what the kernel read ahead would seem to have been there.
                opened.read_and_drop(target[start:], at)
                return

    def _read_at_once(self, opened: OpenedFile, places: Sequence[tuple[memoryview, int]]) -> bool:
        """Read past the cache; False where the buffer is too small for that, or the disk refuses."""
        room = self._bounce[: self.piece_bytes + 2 * opened.alignment]
        gathered = gather(places, room, opened.alignment) if opened.direct else None
        if gathered is None:
            return False
        if not opened.read_direct(gathered.buffers, gathered.offset, gathered.wanted_bytes):
            return False
        for target, source in gathered.copies:
            copy(target, source)
        return True

    def _read_and_move(self, opened: OpenedFile, target: memoryview, offset: int) -> int:
        """Fill the front of a target that lies otherwise than the file; return how much of it.

        It is read to where in the target it lies as in the file, and moved: so the disk is asked for
        as much at once as anywhere, and no buffer is needed.
        """
        shift = (offset - address_of(target)) % opened.alignment
        if not shift or len(target) < _LEAST_MOVED_BYTES or not opened.direct:
            return 0
        count = down(offset + len(target) - shift, opened.alignment) - offset
        alike = target[shift : shift + count]
        if not self._read_at_once(opened, [(alike, offset)]):
            return 0
        copy(target[:count], alike)
        return count

    def _read_around_cache(self, opened: OpenedFile, offset: int, size: int) -> memoryview | None:
        """Return the bytes in the buffer; None where the disk refuses."""
        skip = offset % opened.alignment
        buffer = self._bounce[: up(skip + size, opened.alignment)]
        if not opened.direct or not opened.read_direct([buffer], offset - skip, skip + size):
            return None
        return self._bounce[skip : skip + size]


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the GIL, as an assignment of slices would."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


@cache
def copies_by_mapping(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether this processor copies what is cached faster out of a mapping than the kernel does.

    glibc's memcpy writes past the caches of an x86 processor. The kernel copies by one instruction
    where that is fast ("fsrm"): on an AMD EPYC faster than memcpy, on an Intel Xeon not
    (``benchmarks/copying.py``).
    """
    try:
        with cpuinfo.open() as lines:
            first = takewhile(str.strip, lines)  # one processor's
            parted = [line.partition(":") for line in first]
    except OSError:
        return False
    told = {name.strip(): value.split() for name, _, value in parted}
    if told.get("vendor_id") == ["AuthenticAMD"]:
        return "fsrm" not in told.get("flags", [])
    return told.get("vendor_id") == ["GenuineIntel"]


def _copy_cached(opened: OpenedFile, target: memoryview, offset: int) -> None:
    """Fill a target with what is cached: read, or copied from where it lies to pages that are cleared before."""
    if len(target) < COPIED_BYTES or not copies_by_mapping():
        opened.read_cached(target, offset)
        return
    make_present(target)
    with opened.looking(offset, len(target)) as found:
        copy(target, found)
