"""Read parts of files into memory, from the page cache or past it with ``O_DIRECT``.

A direct read is faster than one through the page cache, and adds no page that counts as memory of the
process's cgroup. If the file system refuses ``O_DIRECT``, the file is read through the page cache, and
its pages are dropped after each read.
"""

import ctypes
import errno
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch

from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream.foreign import AGAIN, unreadable
from weighin.stream.slices import Slice

ALIGNMENT: Final = 4096  # of O_DIRECT reads: most file systems need 512, and few more than 4096
# A read through a buffer: several threads keep a disk busy by them, and it fits into a processor's cache.
PIECE_BYTES: Final = 512 * 1024
# So many keep a local disk busy while some convert values or wait for a small read.
DISK_THREADS: Final = 16
MOST_THREADS: Final = 64
HUGE_PAGE_BYTES: Final = 2 * 1024**2
TENSOR_ALIGNMENT: Final = 64  # torch's own, which affects how some operations round
MAP_NORESERVE: Final = 0x4000  # linux/mman.h: the mapping does not count as committed memory
_LATE_NS: Final = 500_000  # a local disk answers a small read within 50,000 to 200,000 ns
_NEARLY_CACHED: Final = 15 / 16  # then only the missing pages are read from the disk
_LEAST_STRAIGHT_BYTES: Final = 64 * 1024  # smaller targets are as fast through the buffer
_DROPPED_BYTES: Final = 1024**2  # read through the page cache before the pages are dropped
_WANTED_BYTES_PER_S: Final = 10**9  # the wanted rate of all threads together
_LATE_BUFFERS_BYTES: Final = 8 * 1024**2  # of all threads together
_SMALL_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 128 * 1024  # one request of FUSE
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class Reader:
    """Reads parts of files on one thread, with one open file and one buffer at a time."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self.piece_bytes = piece_bytes
        room = piece_bytes + 3 * ALIGNMENT  # a direct read begins and ends at a page
        self._buffer = memoryview(mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE))
        self._path = Path()
        self._direct = self._opened = -1

    def read(self, file: Path, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on, by one system call if possible.

        The kernel writes whole pages of the file to the pages that lie wholly in a large target; the
        first and last bytes pass through the buffer. If the offset within a page differs in memory
        and in the file, the bytes are afterwards moved by less than a page.
        """
        address, end = address_of(target), offset + len(target)
        first, low, last = _down(offset), _up(offset), _up(end)
        page = -address % ALIGNMENT
        size = _down(max(0, min(end - low, len(target) - page)))
        if size < _LEAST_STRAIGHT_BYTES:
            low, size = last, 0
        head = self._buffer[: low - first]
        tail = self._buffer[low - first : last - first - size]
        fits = len(head) + len(tail) == last - first - size
        buffers = [one for one in (head, target[page : page + size], tail) if one] if fits else []
        if not self._read(file, target, offset, buffers):
            return
        before = low - offset
        if size and page != before:
            ctypes.memmove(address + before, address + page, size)
        target[:before] = head[offset - first :][: len(target)]
        if rest := target[before + size :]:
            rest[:] = tail[: len(rest)]

    def piece(self, file: Path, offset: int, size: int) -> memoryview:
        """Read at most ``piece_bytes`` into the buffer, at the file's address within a page."""
        skip = offset % ALIGNMENT
        piece = self._buffer[skip : skip + size]
        self._read(file, piece, offset, [self._buffer[: _up(skip + size)]])
        return piece

    def cached_share(self, file: Path, offset: int, size: int) -> float:
        """Return the share of the pages of a range that the kernel reports as cached, from 0 to 1."""
        if file is not self._path and file != self._path:
            self.close()
            self._path = file
            with suppress(OSError):  # tmpfs, some network file systems; others fail at a read
                self._direct = os.open(file, os.O_RDONLY | os.O_DIRECT)
        any_descriptor = self._direct if self._direct >= 0 else self._cached
        return page_cache.cached_share(any_descriptor, offset, size)

    def close(self) -> None:
        for descriptor in (self._direct, self._opened):
            if descriptor >= 0:
                os.close(descriptor)
        self._path, self._direct, self._opened = Path(), -1, -1

    @property
    def _cached(self) -> int:
        """The descriptor for reads through the page cache; opening it may ask a server."""
        if self._opened < 0:
            try:
                self._opened = os.open(self._path, os.O_RDONLY)
            except OSError as error:
                raise unreadable(self._path, error) from error
        return self._opened

    def _read(
        self, file: Path, target: memoryview, offset: int, buffers: Sequence[memoryview]
    ) -> bool:
        """Read directly into page-aligned ``buffers`` and return True, or into ``target`` and return False."""
        is_cached = self.cached_share(file, offset, len(target)) >= _NEARLY_CACHED
        start = _down(offset)
        if not is_cached and self._read_direct(buffers, start, offset + len(target) - start):
            return True
        self._through_cache(target, offset, drops=not is_cached)
        return False

    def _read_direct(self, buffers: Sequence[memoryview], offset: int, wanted_bytes: int) -> bool:
        """Return False if there are no buffers, or the file system refuses, or stops within a page."""
        done = 0
        while buffers and self._direct >= 0 and done < wanted_bytes:
            rest, left = list(buffers), done
            while left >= len(rest[0]):
                left -= len(rest.pop(0))
            try:
                end = done + os.preadv(self._direct, [rest[0][left:], *rest[1:]], offset + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise unreadable(self._path, error) from error
                os.close(self._direct)
                self._direct = -1
                return False
            if end < wanted_bytes and (end := _down(end)) == done:
                return False
            done = end
        return done >= wanted_bytes

    def _through_cache(self, target: memoryview, offset: int, *, drops: bool) -> None:
        """Read through the page cache; with ``drops``, drop the pages after each MiB."""
        done = 0
        while done < len(target):
            part = target[done : done + _DROPPED_BYTES] if drops else target[done:]
            try:
                read = os.preadv(self._cached, [part], offset + done)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not read:
                end = f"{offset + len(target):,}"
                raise CheckpointError(f"{self._path}: truncated: it ends before byte {end}", AGAIN)
            done += read
            if drops:  # again from the MiB before, which may have ended within several pages' folio
                start = _down(max(0, offset + done - read - _DROPPED_BYTES))
                size = offset + done - start
                os.posix_fadvise(self._cached, start, size, os.POSIX_FADV_DONTNEED)


class Readers(NamedTuple):
    """How many threads read, the bytes of each one's buffer, and whether the disk is slow to answer."""

    threads: int
    piece_bytes: int = PIECE_BYTES
    late: bool = False


def choose(small_ns: int, sample_ns: int) -> Readers:
    """Return how to read a disk that took these times for a read of 4 KiB and one of 128 KiB.

    A local disk is fastest with few, large reads. Storage behind a network takes milliseconds, and FUSE
    divides a read into requests of 128 KiB: up to 64 threads must make small reads at the same time.
    """
    if min(small_ns, sample_ns) < _LATE_NS:  # the quicker of both gives the latency
        return Readers(DISK_THREADS)
    threads = DISK_THREADS
    while (
        threads < MOST_THREADS and threads * _SAMPLE_BYTES * 1e9 < _WANTED_BYTES_PER_S * sample_ns
    ):
        threads *= 2
    return Readers(threads, _LATE_BUFFERS_BYTES // threads - 2 * ALIGNMENT, late=True)


class Disk:
    """How one load reads its disk. If ``threads`` is None, the disk's latency decides how many there are."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._readers: Readers | None = None

    def readers(self, reader: Reader, file: Path, offset: int, size: int) -> Readers:
        """Return how to read an uncached file. The disk's latency is measured on the first large file."""
        if self._readers is None:
            if self.threads == 1 or size < _SAMPLE_BYTES:
                return Readers(self.threads or DISK_THREADS)
            middle = _down(offset + (size - _SAMPLE_BYTES) // 2)
            times_ns = []
            for nbytes in (_SMALL_BYTES, _SAMPLE_BYTES):
                start_ns = time.monotonic_ns()
                reader.piece(file, middle, nbytes)
                times_ns.append(time.monotonic_ns() - start_ns)
                if times_ns[-1] < _LATE_NS:
                    break
            chosen = choose(times_ns[0], times_ns[-1])
            self._readers = chosen._replace(threads=self.threads or chosen.threads)
        return self._readers


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def mapped(where: Slice, maps: dict[Path, mmap.mmap] | None = None) -> torch.Tensor:
    """Return a tensor in a mapping of its file; ``maps`` keeps the mapping for further tensors."""
    if not where.span:
        return torch.empty(where.shape, dtype=where.dtype)
    maps = {} if maps is None else maps
    end = where.offset + where.span * where.dtype.itemsize
    if where.file not in maps:
        with where.file.open("rb") as file:
            # Copy-on-write, because torch needs a writable buffer; nothing is ever written to it.
            if size := os.fstat(file.fileno()).st_size:
                flags = mmap.MAP_PRIVATE | MAP_NORESERVE
                maps[where.file] = mmap.mmap(file.fileno(), size, flags=flags)
    memory = maps.get(where.file, b"")
    if len(memory) < end:
        raise CheckpointError(f"{where.file}: truncated: the file ends before byte {end:,}", AGAIN)
    flat = torch.frombuffer(memory, dtype=where.dtype, offset=where.offset, count=where.span)
    return flat.as_strided(where.shape, where.stride)


def allocate(numel: int, dtype: torch.dtype, device: torch.device, offset: int = 0) -> torch.Tensor:
    """Return a flat uninitialised tensor; one on the CPU comes from ``allocate_all``."""
    if device.type == "cpu":
        return allocate_all([(numel, dtype, offset)])[0]
    return torch.empty(numel, dtype=dtype, device=device)


def allocate_all(tensors: Sequence[tuple[int, torch.dtype, int]]) -> list[torch.Tensor]:
    """Return flat uninitialised CPU tensors, in huge pages if they take 2 MiB or more together.

    An item of ``tensors`` is a number of elements, a dtype, and the tensor's offset in its file. A large
    tensor gets the same offset within a page as in the file (rounded down to ``TENSOR_ALIGNMENT``), so that
    direct reads need no buffer. Without huge pages, page faults would take most of the time of a load from
    the page cache. Each tensor has its own storage, as ``torch.save`` needs, and frees its own pages.
    """
    starts, end = [], 0
    for numel, dtype, offset in tensors:
        size = numel * dtype.itemsize
        within = offset % ALIGNMENT - offset % TENSOR_ALIGNMENT
        is_large = size >= _LEAST_STRAIGHT_BYTES
        starts.append(
            end + (within - end) % ALIGNMENT if is_large else end + -end % TENSOR_ALIGNMENT
        )
        end = starts[-1] + size
    if end < HUGE_PAGE_BYTES:
        return [torch.empty(numel, dtype=dtype, device="cpu") for numel, dtype, _ in tensors]
    memory = mmap.mmap(-1, end + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    skip = -address_of(memoryview(memory)) % HUGE_PAGE_BYTES
    # Only whole huge pages, because the kernel charges a partly used huge page in full.
    page_cache.ask_for_huge_pages(memory, skip, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    found = []
    for start, (numel, dtype, _) in zip(starts, tensors, strict=True):
        if not numel:
            found.append(torch.empty(0, dtype=dtype, device="cpu"))
            continue
        first, last = skip + start, skip + start + numel * dtype.itemsize
        view = memoryview(memory)[first:last]
        low, high = _up(first), _down(last)
        if low < high:
            free = weakref.finalize(view, memory.madvise, mmap.MADV_DONTNEED, low, high - low)
            free.atexit = False
        found.append(torch.frombuffer(view, dtype=dtype))
    return found


def _down(offset: int) -> int:
    return offset - offset % ALIGNMENT


def _up(offset: int) -> int:
    return _down(offset + ALIGNMENT - 1)
