"""Reading stretches of a file into memory as fast as the machine allows, whatever is cached.

A piece that the page cache holds is copied from it; any other is read around it with ``O_DIRECT``,
which is faster than filling the cache and leaves no page behind to be charged. Where the file
system refuses that, pages are dropped behind the read position.
"""

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

from harness.page_cache import is_cached

PIECE_BYTES: Final = 2 * 1024**2
"""How much is read at once: large enough for a disk, small enough for a processor's cache."""

_ALIGNMENT: Final = 4096  # of O_DIRECT: 512 would do on most disks, 4096 on all
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class PieceReader:
    """Reads from one file, on one thread. Holds a bounce buffer of ``PIECE_BYTES`` and a little."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._buffered = os.open(file, os.O_RDONLY)
        self._direct = _open_direct(file)
        self._bounce = mmap.mmap(-1, PIECE_BYTES + 2 * _ALIGNMENT, flags=mmap.MAP_PRIVATE)

    def read(self, target: memoryview, offset: int) -> None:
        """Fill ``target``, at most ``PIECE_BYTES`` long, with the file's bytes at ``offset``.

        Raises:
            EOFError: the file ends before.
        """
        if is_cached(self._buffered, offset, len(target)):
            self._read_buffered(target, offset)
        elif self._direct >= 0:
            self._read_around_cache(target, offset)
        else:
            self._read_buffered(target, offset)
            os.posix_fadvise(self._buffered, offset, len(target), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)
        self._bounce.close()

    def _read_buffered(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            read = os.preadv(self._buffered, [target[done:]], offset + done)
            if read == 0:
                raise EOFError(f"{self._file} ends before byte {offset + len(target):,}")
            done += read

    def _read_around_cache(self, target: memoryview, offset: int) -> None:
        start = offset - offset % _ALIGNMENT
        skip, end = offset - start, offset + len(target)
        wanted = -(-(end - start) // _ALIGNMENT) * _ALIGNMENT
        bounce = memoryview(self._bounce)
        done = 0
        try:
            while done < end - start:
                read = os.preadv(self._direct, [bounce[done:wanted]], start + done)
                done += read
                if read % _ALIGNMENT or read == 0:
                    break  # only the end of the file is not aligned
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            os.close(self._direct)
            self._direct = -1
            self.read(target, offset)
            return
        if done < end - start:
            raise EOFError(f"{self._file} ends before byte {end:,}")
        copy(target, bounce[skip : skip + len(target)])


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the GIL, as an assignment of slices would."""
    to, from_ = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (target, source))
    ctypes.memmove(to, from_, len(source))


def _open_direct(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return -1  # tmpfs, and some network file systems
