"""Read an open file through the page cache, with ``O_DIRECT``, or by mapping its cached pages."""

import ctypes
import errno
import math
import mmap
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream.foreign import AGAIN, unreadable

ALIGNMENT: Final = 4096
"""The alignment of O_DIRECT reads in bytes: most file systems need 512, and few need more than 4096."""

LARGEST_ALIGNMENT: Final = 64 * 1024
"""The largest alignment in bytes that a reader's buffer supports, for file systems with 64 KiB blocks."""

_AT_EMPTY_PATH: Final = 0x1000  # linux/fcntl.h
_STATX_DIOALIGN: Final = 0x2000  # linux/stat.h; Linux 6.1
_PASSED_BYTES: Final = 1024**2  # read through the page cache before the pages are dropped
_libc: Final = ctypes.CDLL(None, use_errno=True)
_preadv: Final = _libc.preadv  # os.preadv needs an object for each buffer
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

WINDOW_BYTES: Final = 16 * 1024**2
"""The size in bytes of the parts of a file that are mapped one by one for a conversion. The parts are
large because each unmapping interrupts every processor."""

_MADV_POPULATE_READ: Final = 22  # linux/mman.h; Linux 5.14
_MADV_POPULATE_WRITE: Final = 23
_POPULATED_BYTES: Final = 16 * 1024**2  # in one call, because it blocks mmap of other threads
_MAP_FAILED: Final = ctypes.c_size_t(-1).value

# ctypes releases the GIL during these calls; Python's own mmap does not.
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Statx(ctypes.Structure):
    """``struct statx`` of linux/stat.h, with only the fields that this module uses."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("others", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


class OpenedFile:
    """A file open for reading. A read that fails raises a CheckpointError that names the file.

    Attributes:
        alignment: the alignment in bytes that direct reads need, in the file and in memory.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._window: Window | None = None
        self._dropped = 0, 0
        self._opened_buffered = -1
        self._direct = _open_direct(path)
        alignment = alignment_of(self._any)
        self.alignment = alignment or ALIGNMENT
        if not alignment:
            self._close_direct()

    @property
    def _any(self) -> int:
        """An open descriptor of the file; to open a second one may cost a round trip to a server."""
        return self._direct if self.direct else self._buffered

    @property
    def _buffered(self) -> int:
        """The descriptor for reads through the page cache, opened at its first use."""
        if self._opened_buffered < 0:
            try:
                self._opened_buffered = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise unreadable(self.path, error) from error
        return self._opened_buffered

    @property
    def direct(self) -> bool:
        """Whether reads can bypass the page cache; False after the file system refused such a read."""
        return self._direct >= 0

    def is_cached(self, offset: int, size: int) -> bool:
        """Tell whether the kernel reports all pages of a range of the file as cached."""
        return page_cache.is_cached(self._any, offset, size)

    def cached_share(self, offset: int, size: int) -> float:
        """Return the share of the pages of a range that the kernel reports as cached, from 0 to 1."""
        return page_cache.cached_share(self._any, offset, size)

    def read_direct(self, buffers: Sequence[memoryview], offset: int, wanted_bytes: int) -> bool:
        """Read ``wanted_bytes`` past the page cache into aligned buffers, one buffer after the other.

        Return False if the file system refuses ``O_DIRECT``; ``direct`` is False from then on.
        """
        done = 0
        while done < wanted_bytes:
            try:
                read = os.preadv(self._direct, _behind(buffers, done), offset + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise unreadable(self.path, error) from error
                self._close_direct()
                return False
            end = done + read
            if end < wanted_bytes:
                end = down(end, self.alignment)  # a direct read must begin aligned
                if end == done:
                    self._read_rest(_behind(buffers, done), offset + done, wanted_bytes - done)
                    return True
            done = end
        return True

    def _read_rest(self, buffers: Sequence[memoryview], offset: int, wanted_bytes: int) -> None:
        """Read the last bytes of a file, which no direct read can return, through the page cache."""
        for buffer in buffers:
            size = min(len(buffer), wanted_bytes)
            self.read_and_drop(buffer[:size], offset)
            offset, wanted_bytes = offset + size, wanted_bytes - size

    def read_cached(self, targets: Sequence[memoryview], offset: int) -> None:
        """Fill targets from one range of the file through the page cache, and keep the pages there."""
        end = offset + sum(map(len, targets))
        done = 0
        while offset + done < end:
            done += self._read_some(_behind(targets, done), offset + done, end)

    def read_scattered(self, buffers: "array[int]", offset: int, size: int) -> bool:
        """Fill buffers by one read through the page cache; return False if it does not fill them all.

        ``buffers`` has each buffer's address and size in turn. All buffers together have ``size`` bytes.
        """
        first, _ = buffers.buffer_info()
        return bool(_preadv(self._buffered, first, len(buffers) // 2, offset) == size)

    def read_and_drop(self, target: memoryview, offset: int) -> None:
        """Read through the page cache, and drop the pages after each MiB."""
        done = 0
        while done < len(target):
            at, part = offset + done, target[done : done + _PASSED_BYTES]
            read = self._read_some([part], at, offset + len(target))
            self._drop_behind(at, at + read)
            done += read

    @contextmanager
    def looking(self, offset: int, size: int) -> Iterator[memoryview]:
        """Map cached pages of the file, read-only, until the context exits.

        Raises:
            CheckpointError: the file is too short.
        """
        self._window = self._window or Window(self._buffered)
        try:
            with self._window.looking(offset, size) as mapped:
                yield mapped
        except EOFError as error:
            raise self._ended(offset + size) from error

    def close(self) -> None:
        """Close the file; the caller must no longer use any view of the mapped memory."""
        if self._window:
            self._window.close()
            self._window = None
        if self._opened_buffered >= 0:
            os.close(self._opened_buffered)
        self._close_direct()

    def _drop_behind(self, start: int, end: int) -> None:
        """Drop the cached pages of a range, and again those of the previous call if it ended at ``start``.

        The kernel does not drop a page, or a folio of several pages, that lies only partly in the
        range. The previous call may have ended inside such a folio.
        """
        first, last = self._dropped
        first = first if start == last else down(start, mmap.PAGESIZE)
        os.posix_fadvise(self._buffered, first, end - first, os.POSIX_FADV_DONTNEED)
        self._dropped = first, end

    def _close_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _read_some(self, targets: Sequence[memoryview], offset: int, wanted_end: int) -> int:
        try:
            read = os.preadv(self._buffered, targets, offset)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if read == 0:
            raise self._ended(wanted_end)
        return read

    def _ended(self, wanted_end: int) -> CheckpointError:
        return CheckpointError(f"{self.path}: truncated: it ends before byte {wanted_end:,}", AGAIN)


def _behind(buffers: Sequence[memoryview], filled: int) -> list[memoryview]:
    """Return the buffers without their first ``filled`` bytes."""
    rest = list(buffers)
    while rest and filled >= len(rest[0]):
        filled -= len(rest.pop(0))
    return [rest[0][filled:], *rest[1:]] if rest else []


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs, some network file systems; other errors show at the first read
        return -1


def alignment_of(descriptor: int) -> int:
    """Return the alignment in bytes that direct reads of an open file need; 0 if the file allows no
    direct reads, or if the reader's buffers do not support their alignment.

    The alignment is a multiple of ``ALIGNMENT``. If the C library or the kernel cannot report one,
    the result is ``ALIGNMENT``, and the first read shows whether direct reads work.
    """
    status = _Statx()
    statx = getattr(_libc, "statx", None)  # glibc 2.28, musl 1.2.5
    if statx is None:
        return ALIGNMENT
    failed = statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(status))
    if failed or not status.mask & _STATX_DIOALIGN:
        return ALIGNMENT
    if not status.dio_offset_align or ALIGNMENT % max(1, status.dio_mem_align):
        return 0
    alignment = math.lcm(ALIGNMENT, status.dio_offset_align)
    return alignment if alignment <= LARGEST_ALIGNMENT else 0


class Window:
    """A mapping of a whole file; only inside ``looking`` are its pages resident (file-backed memory)."""

    def __init__(self, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        self._address: int = _MAP_FAILED
        if self._size:
            self._address = _libc.mmap(
                None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0
            )
            if self._address == _MAP_FAILED:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))

    @contextmanager
    def looking(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes at ``offset``, read-only; they are valid until the context exits.

        If another process truncates the file meanwhile, SIGBUS kills this process, as for any mapping.

        Raises:
            EOFError: the file is too short.
        """
        if offset + size > self._size:
            raise EOFError
        start = self._address + offset - offset % mmap.PAGESIZE
        length = self._address + offset + size - start
        # Maps all pages by one call. Before Linux 5.14 the call fails, and page faults map the pages.
        if _libc.madvise(start, length, _MADV_POPULATE_READ) and ctypes.get_errno() == errno.EFAULT:
            raise EOFError  # the file was truncated
        try:
            yield memoryview((ctypes.c_ubyte * size).from_address(self._address + offset))
        finally:
            # Unmap the whole file: the kernel may have mapped more pages of the same huge page.
            _libc.madvise(self._address, self._size, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file; the caller must no longer use any view of the mapped memory."""
        if self._address != _MAP_FAILED:
            _libc.munmap(self._address, self._size)
            self._address = _MAP_FAILED


def ask_for_huge_pages(area: mmap.mmap, start: int, size: int) -> None:
    """Ask the kernel for huge pages in a part of a mapping; no error if the kernel has none."""
    with suppress(AttributeError, OSError):
        area.madvise(mmap.MADV_HUGEPAGE, start, size)


def make_present(memory: memoryview) -> None:
    """Populate all pages of anonymous memory before a copy, which page faults would slow down.

    ``make_present`` does nothing before Linux 5.14, which introduced ``MADV_POPULATE_WRITE``.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, end = address - address % mmap.PAGESIZE, address + len(memory)
    for start in range(first, end, _POPULATED_BYTES):
        length = min(_POPULATED_BYTES, end - start)
        if _libc.madvise(start, length, _MADV_POPULATE_WRITE):
            return


def down(offset: int, alignment: int) -> int:
    return offset - offset % alignment


def up(offset: int, alignment: int) -> int:
    return down(offset + alignment - 1, alignment)
