"""A file that is open for reading: through the page cache, around it, and where it lies in there."""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.loader.alignment import alignment_of
from weighin.loader.mapped_copy import Window
from weighin.loader.vectored import ALIGNMENT, down
from weighin.probes import page_cache

_PASSED_BYTES: Final = 1024**2  # of the page cache, where what was read is dropped behind it
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class OpenedFile:
    """An open file. Whatever cannot be read of it is a CheckpointError that names it.

    Attributes:
        alignment: of what is read past the page cache, in bytes: in the file, and in memory.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._window: Window | None = None
        self._dropped = 0, 0
        try:
            self._buffered = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        self._direct = -1
        self.alignment = ALIGNMENT
        if alignment := alignment_of(self._buffered):
            self._direct, self.alignment = _open_direct(path), alignment

    @property
    def direct(self) -> bool:
        """Whether the page cache can be gone around, as far as is known."""
        return self._direct >= 0

    def is_cached(self, offset: int, size: int) -> bool:
        """Tell whether the page cache is known to hold all of a stretch."""
        return page_cache.is_cached(self._buffered, offset, size)

    def read_direct(self, buffers: Sequence[memoryview], offset: int, wanted_bytes: int) -> bool:
        """Read what is wanted into aligned buffers in turn; False, from now on, where the disk refuses.

        Raises:
            CheckpointError: the file ends before, or the disk fails.
        """
        done = 0
        while done < wanted_bytes:
            try:
                read = os.preadv(self._direct, _behind(buffers, done), offset + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise self._unreadable(error) from error
                self._close_direct()
                return False
            end = done + read
            if end < wanted_bytes:
                end = down(end, self.alignment)  # it may end anywhere; the next begins where it may
                if end == done:
                    self._read_rest(_behind(buffers, done), offset + done, wanted_bytes - done)
                    return True
            done = end
        return True

    def _read_rest(self, buffers: Sequence[memoryview], offset: int, wanted_bytes: int) -> None:
        """Read what a disk does not give at its alignment, as the end of a file may be."""
        for buffer in buffers:
            size = min(len(buffer), wanted_bytes)
            self.read_and_drop(buffer[:size], offset)
            offset, wanted_bytes = offset + size, wanted_bytes - size

    def read_cached(self, target: memoryview, offset: int) -> None:
        """Read through the page cache, which keeps what it holds then.

        Raises:
            CheckpointError: the file ends before, or the disk fails.
        """
        done = 0
        while done < len(target):
            done += self._read_some(target[done:], offset + done, offset + len(target))

    def read_and_drop(self, target: memoryview, offset: int) -> None:
        """Read through the page cache, piece by piece, and drop the pages behind.

        Raises:
            CheckpointError: the file ends before, or the disk fails.
        """
        done = 0
        while done < len(target):
            at, part = offset + done, target[done : done + _PASSED_BYTES]
            read = self._read_some(part, at, offset + len(target))
            self._drop_behind(at, at + read)
            done += read

    @contextmanager
    def looking(self, offset: int, size: int) -> Iterator[memoryview]:
        """Give what is cached of the file where it lies, to be read only.

        Raises:
            CheckpointError: the file ends before.
        """
        self._window = self._window or Window(self._buffered)
        try:
            with self._window.looking(offset, size) as found:
                yield found
        except EOFError as error:
            raise self._ended(offset + size) from error

    def close(self) -> None:
        """Close it. Nobody may look at it any more."""
        if self._window:
            self._window.close()
            self._window = None
        os.close(self._buffered)
        self._close_direct()

    def _drop_behind(self, start: int, end: int) -> None:
        """Drop what was read, and again what lies before it: the kernel keeps what it is named a part of.

        The page cache holds pages, and several as one; what was read last may end within them.
        """
        first, last = self._dropped
        first = first if start == last else down(start, mmap.PAGESIZE)
        os.posix_fadvise(self._buffered, first, end - first, os.POSIX_FADV_DONTNEED)
        self._dropped = first, end

    def _close_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _read_some(self, target: memoryview, offset: int, wanted_end: int) -> int:
        try:
            read = os.preadv(self._buffered, [target], offset)
        except OSError as error:
            raise self._unreadable(error) from error
        if read == 0:
            raise self._ended(wanted_end)
        return read

    def _ended(self, wanted_end: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: truncated: it ends before byte {wanted_end:,}",
            "copy or download the file again",
        )

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: cannot read it: {error.strerror}",
            "check that the file is there, that you may read it, and that its disk is well",
        )


def _behind(buffers: Sequence[memoryview], filled: int) -> list[memoryview]:
    """Return what of the buffers lies behind so many bytes."""
    rest = list(buffers)
    while rest and filled >= len(rest[0]):
        filled -= len(rest.pop(0))
    return [rest[0][filled:], *rest[1:]] if rest else []


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs, and some network file systems; what else is wrong, any read tells
        return -1
