"""Reading stretches of a file into memory as fast as the machine allows, whatever is cached.

A piece that the page cache holds is copied from it; any other is read around it with ``O_DIRECT``,
which is faster than filling the cache and leaves no page behind to be charged. What lies one behind
the other is one read. Where memory lies otherwise than the file, it is read beside its place and
moved. Where the file system refuses that, pages are dropped behind the read position.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from harness.checkpoint.gathering import ALIGNMENT, address_of, gather
from harness.checkpoint.window import Window, make_present
from harness.page_cache import is_cached

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

_LEAST_MOVED_BYTES: Final = 2 * PIECE_BYTES  # what is less passes the buffer as fast
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class PieceReader:
    """Reads pieces of files, on one thread: one file is open at a time, one buffer serves them all.

    Args:
        buffer: page-aligned memory to use; else the reader has its own, which takes ``BUFFER_BYTES``
            once something is read that needs it.
    """

    def __init__(self, buffer: memoryview | None = None) -> None:
        self._file: Path | None = None
        self._buffered = self._direct = -1
        self._window: Window | None = None
        self._bounce = buffer or memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE))

    def read(self, file: Path, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the file's bytes at ``offset``, at once wherever that can be.

        Raises:
            EOFError: the file ends before.
        """
        self.read_together(file, [(target, offset)])

    def read_together(self, file: Path, places: Sequence[tuple[memoryview, int]]) -> None:
        """Fill targets, given with their offsets, that lie one behind the other in the file.

        Raises:
            EOFError: the file ends before.
        """
        self._open(file)
        (_, start), (last, at) = places[0], places[-1]
        if is_cached(self._buffered, start, at + len(last) - start):
            for target, offset in places:
                self._read_through_cache(target, offset)
        elif not self._read_at_once(places):
            for target, offset in places:
                self._read_alone(target, offset)

    @property
    def piece_bytes(self) -> int:
        """The most bytes that a piece has."""
        return len(self._bounce) - 2 * ALIGNMENT

    def piece(self, file: Path, offset: int, size: int) -> memoryview:
        """Return ``size`` bytes of the file, at most ``piece_bytes``, in the reader's buffer.

        They are good until the next read, and begin at a multiple of 8 wherever they lie in the file.

        Raises:
            EOFError: the file ends before.
        """
        self._open(file)
        if (piece := self._read_around_cache(offset, size)) is None:
            piece = self._bounce[:size]
            self._read_through_cache(piece, offset)
        elif offset % LARGEST_ELEMENT_BYTES:
            aligned = self._bounce[:size]
            copy(aligned, piece)  # towards the front: memmove bears the overlap
            piece = aligned
        return piece

    def is_cached(self, file: Path, offset: int, size: int) -> bool:
        """Tell whether the page cache holds all of a stretch."""
        self._open(file)
        return is_cached(self._buffered, offset, size)

    @contextmanager
    def looking(self, file: Path, offset: int, size: int) -> Iterator[memoryview]:
        """Give what is cached of a file where it lies, to be read only: at most ``WINDOW_BYTES``.

        Raises:
            EOFError: the file ends before.
        """
        self._open(file)
        with self._looking(offset, size) as found:
            yield found

    @contextmanager
    def _looking(self, offset: int, size: int) -> Iterator[memoryview]:
        self._window = self._window or Window(self._buffered)
        try:
            with self._window.looking(offset, size) as found:
                yield found
        except EOFError as error:
            raise self._ended(offset + size) from error

    def close(self) -> None:
        """Close the file that is open. The buffer goes when nobody looks at it any more."""
        for descriptor in (self._buffered, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        if self._window:
            self._window.close()
        self._window = None
        self._buffered = self._direct = -1
        self._file = None

    def _open(self, file: Path) -> None:
        if file != self._file:
            self.close()
            self._buffered = os.open(file, os.O_RDONLY)
            self._direct = _open_direct(file)
            self._file = file

    def _read_alone(self, target: memoryview, offset: int) -> None:
        """Fill a target in pieces, as far as its bulk cannot be moved into place."""
        moved = self._read_and_move(target, offset)
        for start in range(moved, len(target), PIECE_BYTES):
            part, at = target[start : start + PIECE_BYTES], offset + start
            if is_cached(self._buffered, at, len(part)) or not self._read_at_once([(part, at)]):
                self._read_through_cache(part, at)

    def _read_through_cache(self, target: memoryview, offset: int) -> None:
        """Read what is cached, or what cannot be read otherwise; the latter is dropped piece by piece."""
        was_cached = self._direct >= 0 or is_cached(self._buffered, offset, len(target))
        if was_cached and len(target) >= COPIED_BYTES:
            self._copy_from_cache(target, offset)
            return
        most = len(target) if was_cached else PIECE_BYTES
        done = 0
        while done < len(target):
            read = os.preadv(self._buffered, [target[done : done + most]], offset + done)
            if read == 0:
                raise self._ended(offset + len(target))
            if not was_cached:
                os.posix_fadvise(self._buffered, offset + done, read, os.POSIX_FADV_DONTNEED)
            done += read

    def _copy_from_cache(self, target: memoryview, offset: int) -> None:
        """Copy what is cached from where it lies to pages that are made, and cleared, before."""
        make_present(target)
        with self._looking(offset, len(target)) as found:
            copy(target, found)

    def _read_at_once(self, places: Sequence[tuple[memoryview, int]]) -> bool:
        """Read past the cache; False where the buffer is too small for that, or the disk refuses."""
        gathered = gather(places, self._bounce) if self._direct >= 0 else None
        if gathered is None:
            return False
        if not self._read_direct(gathered.buffers, gathered.offset, gathered.wanted_bytes):
            return False
        for target, source in gathered.copies:
            copy(target, source)
        return True

    def _read_and_move(self, target: memoryview, offset: int) -> int:
        """Fill the front of a target that lies otherwise than the file; return how much of it.

        It is read to where in the target it lies as in the file, and moved: so the disk is asked for
        as much at once as anywhere, and no buffer is needed.
        """
        shift = (offset - address_of(target)) % ALIGNMENT
        if not shift or len(target) < _LEAST_MOVED_BYTES or self._direct < 0:
            return 0
        count = len(target) - shift
        count -= (offset + count) % ALIGNMENT
        alike = target[shift : shift + count]
        if not self._read_at_once([(alike, offset)]):
            return 0
        copy(target[:count], alike)
        return count

    def _read_around_cache(self, offset: int, size: int) -> memoryview | None:
        """Return the bytes in the buffer; None where they are cached, or the disk refuses."""
        if self._direct < 0 or is_cached(self._buffered, offset, size):
            return None
        skip = offset % ALIGNMENT
        buffer = self._bounce[: -(-(skip + size) // ALIGNMENT) * ALIGNMENT]
        if not self._read_direct([buffer], offset - skip, skip + size):
            return None
        return self._bounce[skip : skip + size]

    def _read_direct(self, buffers: list[memoryview], offset: int, wanted: int) -> bool:
        """Read what is wanted into the buffers in turn; False, from now on, where the disk refuses."""
        done = 0
        while done < wanted:
            try:
                read = os.preadv(self._direct, buffers, offset + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                os.close(self._direct)
                self._direct = -1
                return False
            done += read
            if done < wanted and (read % ALIGNMENT or read == 0):
                raise self._ended(offset + wanted)  # only the end of the file is not aligned
            buffers = _behind(buffers, read)
        return True

    def _ended(self, wanted_end: int) -> EOFError:
        return EOFError(f"{self._file} ends before byte {wanted_end:,}")


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the GIL, as an assignment of slices would."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


def _behind(buffers: list[memoryview], filled: int) -> list[memoryview]:
    """Return what of the buffers lies behind so many bytes."""
    while buffers and filled >= len(buffers[0]):
        filled -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][filled:], *buffers[1:]] if buffers else []


def _open_direct(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return -1  # tmpfs, and some network file systems
