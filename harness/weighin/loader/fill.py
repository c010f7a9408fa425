"""Run the threads that fill tensors from a checkpoint's files.

A disk is fastest with large reads, but a read whose values change their dtype needs a buffer of the read's
size. Memory of the largest tensors to convert lends itself as such buffers until it is filled, last.

A tensor of at most 64 KiB gains nothing from huge pages. With many small tensors, function calls take
most of the load time. One system call therefore fills hundreds of them in their present memory.
"""

import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import Final

import torch

from weighin.construction.deferred import DeferredLoad
from weighin.loader.direct_io import (
    BUFFER_BYTES,
    COPIED_BYTES,
    DISK_THREADS,
    MOST_UNUSED_BYTES,
    PIECE_BYTES,
    DiskReaders,
    PieceReader,
    Readers,
    copies_by_mapping,
)
from weighin.loader.memory import HUGE_PAGE_BYTES, Fill, Piece, cut, memory_of
from weighin.loader.open_file import ALIGNMENT
from weighin.loader.reads import PieceFiller, Runs
from weighin.stream.slices import TensorSlice

READ_BYTES: Final = 16 * HUGE_PAGE_BYTES
"""The size in bytes of a thread's reads if no dtype is converted. The reads are large so that threads
seldom wait for the lock of the queue from which they take the reads."""

_MOST_CACHE_THREADS: Final = 4
_MOST_PROBED: Final = 16  # reads
_MOSTLY: Final = 0.75

LENT_BYTES: Final = 12 * HUGE_PAGE_BYTES
"""The largest size in bytes of a buffer in a tensor's memory. Reads into such a buffer are no larger."""

_LEAST_BYTES: Final = 2 * PIECE_BYTES  # a smaller buffer is no faster than a reader's own of 1 MiB
SMALL_BYTES: Final = 64 * 1024
_LEAST_TENSORS: Final = 16  # fewer adjacent tensors are read together with larger tensors
# preadv takes 1024 buffers, and a tensor and the gap before it take two.
_MOST_TENSORS: Final = 500


@dataclass(frozen=True, slots=True)
class Lent:
    """All reads of a load. The ``borrowers`` run first, with the targets of ``lenders`` as buffers."""

    lenders: tuple[Piece, ...]
    borrowers: Iterator[Piece]


@contextmanager
def being_filled(stretches: Sequence[Fill], disk: DiskReaders) -> Iterator[None]:
    """Fill all ``stretches`` on background threads while the body of the ``with`` statement runs.

    The ``with`` statement ends after the last read. The first error, in a reading thread or in the
    body of the ``with`` statement, stops all reading threads. Torch computes on one thread until
    the ``with`` statement ends.

    Args:
        disk: chooses the number of threads if the files are not cached.
    """
    if not stretches:
        yield
        return
    readers, lent = _divided(stretches, disk)
    threads, piece_bytes = readers.threads, readers.piece_bytes
    runs = Runs(lent.borrowers, piece_bytes if readers.late else READ_BYTES)
    failed = threading.Event()

    def work(lender: Piece | None) -> None:
        with PieceFiller(buffer_in(lender) if lender else None, piece_bytes) as filler:
            while not failed.is_set() and (run := runs.take(filler.most_converted_bytes)):
                filler.fill(run)
        if lender and not failed.is_set():
            with PieceFiller(None) as filler:
                filler.fill([lender])

    def work_or_fail(lender: Piece | None) -> None:
        try:
            work(lender)
        except BaseException:
            failed.set()
            raise

    with one_thread_each, ThreadPoolExecutor(threads) as pool:
        lenders = [*lent.lenders, *[None] * threads][:threads]
        futures = [pool.submit(work_or_fail, lender) for lender in lenders]
        try:
            yield
        except BaseException:
            failed.set()
            raise
        for future in futures:
            future.result()


def compute(fills: Iterable[Fill], threads: int | None) -> None:
    """Call each tensor's function ``fill``, which computes its values; the first error ends the load.

    Args:
        threads: the number of threads, at most ``cache_threads()``. Each thread needs a few MiB.
    """
    most = min(threads or cache_threads(), cache_threads())
    largest_first = sorted(fills, key=lambda one: one.memory.nbytes, reverse=True)
    if not largest_first:
        return
    with one_thread_each, ThreadPoolExecutor(most) as pool:
        futures = [
            pool.submit(one.source.fill, one.memory) for one in largest_first if one.source.fill
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _divided(stretches: Sequence[Fill], disk: DiskReaders) -> tuple[Readers, Lent]:
    """Return the number of reading threads, the size of their buffers, and all reads to make."""
    largest = max(stretches, key=lambda stretch: stretch.memory.nbytes)
    pieces = list(islice(largest.pieces(READ_BYTES), _MOST_PROBED))
    with closing(PieceReader()) as reader:
        if _is_mostly_cached(pieces, reader):
            readers = Readers(disk.threads or cache_threads())
            return readers, Lent((), copies(stretches, readers.threads))
        first = pieces[0]
        readers = disk.of(reader, first.source.file, first.offset, first.source_bytes)
    if not readers.late:
        return readers, lend(stretches, READ_BYTES, readers.threads)
    most = readers.piece_bytes  # bytes of memory, and bytes of the file
    sizes = (min(most, most * one.memory.nbytes // max(1, one.source_bytes)) for one in stretches)
    reads = (one.pieces(size) for one, size in zip(stretches, sizes, strict=True))
    return readers, Lent((), chain.from_iterable(reads))


def copies(stretches: Iterable[Fill], threads: int) -> Iterator[Piece]:
    """Yield the reads that copy ``stretches`` from cached files.

    A large tensor that memcpy copies is divided into equal reads, as many for each thread.
    """
    for stretch in stretches:
        shares = stretch.memory.nbytes // (threads * COPIED_BYTES) * threads
        if stretch.converts or not shares or not copies_by_mapping():
            yield from stretch.pieces(READ_BYTES)
        else:
            pages = ceil(stretch.memory.nbytes / shares / HUGE_PAGE_BYTES)
            yield from stretch.pieces(pages * HUGE_PAGE_BYTES)


def cache_threads() -> int:
    """Return the number of threads that copy cached files: one per available processor, at most 4."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    processors = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(_MOST_CACHE_THREADS, processors)


class _OneThreadEach:
    """Makes torch compute on one thread; else each reading thread would start torch's thread pool.

    ``torch.set_num_threads`` applies to the whole process. If several loads run at the same time,
    the load that ends last restores the number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads = self._threads = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._loads:
                self._threads = torch.get_num_threads()
                torch.set_num_threads(1)
            self._loads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._loads -= 1
            if not self._loads:
                torch.set_num_threads(self._threads)


one_thread_each = _OneThreadEach()


def _is_mostly_cached(pieces: Iterable[Piece], reader: PieceReader) -> bool:
    """Tell whether at least 3/4 of the bytes of the given reads are in the page cache.

    One quarter may be missing, because the kernel may reclaim single pages of a cached file.
    """
    cached_bytes, all_bytes = 0.0, 0
    for piece in pieces:
        opened = reader.opened(piece.source.file)
        share = opened.cached_share(piece.offset, piece.source_bytes)
        cached_bytes += share * piece.source_bytes
        all_bytes += piece.source_bytes
    return cached_bytes >= _MOSTLY * all_bytes


def buffer_bytes(stretches: Iterable[Fill], threads: int | None, *, gpu: bool) -> int:
    """Return the largest size in bytes that the buffers of all threads together can have."""
    threads = threads or DISK_THREADS
    read_bytes = (stretch.source_bytes for stretch in stretches)
    used = sum(min(size, ceil(size / READ_BYTES) * BUFFER_BYTES) for size in read_bytes)
    pinned = threads * 2 * PIECE_BYTES if gpu else 0
    return min(threads * BUFFER_BYTES, used) + pinned


def lend(stretches: Sequence[Fill], most_bytes: int, threads: int) -> Lent:
    """Divide the reads into lenders, whose targets serve as buffers, and borrowers, which use these.

    The lenders are parts of the largest tensors that change their dtype, at most one part for each
    thread. All lenders together have at most half of the bytes of all tensors that change their dtype.

    Args:
        most_bytes: the largest size of the memory that one borrower fills.
    """
    able = [one for one in stretches if one.converts and one.memory.device.type == "cpu"]
    left = sum(stretch.memory.nbytes for stretch in able) // 2
    each = left // threads // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    each = max(_LEAST_BYTES, min(LENT_BYTES, each))
    lenders: list[Piece] = []
    others: dict[int, list[Piece]] = {}
    for stretch in sorted(able, key=lambda stretch: stretch.memory.nbytes, reverse=True):
        if len(lenders) == threads or left < _LEAST_BYTES:
            break
        own = others[id(stretch)] = []
        for piece in stretch.pieces(each):
            size = piece.target.nbytes
            lends = _LEAST_BYTES <= size <= left and piece.target.is_contiguous()
            if lends and len(lenders) < threads:
                lenders.append(piece)
                left -= size
            else:
                own.append(piece)

    def left_of(stretch: Fill) -> Iterable[Piece]:
        return others.get(id(stretch), stretch.pieces(most_bytes))

    adjacent = (left_of(stretch) for stretch in stretches if not stretch.scattered)
    scattered = (left_of(stretch) for stretch in stretches if stretch.scattered)
    pieces = chain(chain.from_iterable(adjacent), merge(*scattered, key=_place))
    return Lent(tuple(lenders), (part for piece in pieces for part in _parts(piece)))


def _place(piece: Piece) -> tuple[str, int]:
    """Return a sort key (file, offset), so that one read can fill adjacent parts of several tensors."""
    return str(piece.source.file), piece.offset


def _parts(piece: Piece) -> Iterator[Piece]:
    """Yield a read, divided into parts of 2 MiB if it uses a buffer, which holds several such parts."""
    if piece.buffered and piece.target.is_contiguous():
        yield from cut(piece.source, piece.offset, piece.target, HUGE_PAGE_BYTES)
    else:
        yield piece


def buffer_in(lender: Piece) -> memoryview:
    """Return the memory of the target of ``lender`` from its first page boundary on, as a buffer."""
    return memory_of(lender.target)[-lender.target.data_ptr() % ALIGNMENT :]


@dataclass(frozen=True, slots=True)
class Group:
    """A range of a file with the bytes of several tensors, and these tensors in the file's order."""

    file: Path
    offsets: list[int]
    tensors: list[torch.Tensor]

    @property
    def start(self) -> int:
        return self.offsets[0]

    @property
    def nbytes(self) -> int:
        """The size of the read that fills all tensors, in bytes."""
        return self.offsets[-1] + self.tensors[-1].nbytes - self.start

    def parts(self, most_bytes: int) -> Iterator["Group"]:
        """Yield the group, divided into parts whose reads have at most ``most_bytes``."""
        if self.nbytes <= most_bytes:
            yield self
            return
        first, count = 0, len(self.tensors)
        ends = [at + one.nbytes for at, one in zip(self.offsets, self.tensors, strict=True)]
        while first < count:
            last = bisect_right(ends, self.offsets[first] + most_bytes, first + 1)
            yield Group(self.file, self.offsets[first:last], self.tensors[first:last])
            first = last


def groups_of_small(
    loads: Sequence[DeferredLoad], device: torch.device, dtype: torch.dtype | None
) -> tuple[list[Group], list[DeferredLoad]]:
    """Return groups of adjacent small tensors that need no conversion, and all other loads.

    Args:
        loads: sorted by file and offset. Fewer than 16 adjacent small tensors make no group.
        device, dtype: those of the model after the load; None as dtype keeps each tensor's dtype.
    """
    groups: list[Group] = []
    others: list[DeferredLoad] = []
    run: list[DeferredLoad] = []
    on_cpu = device.type == "cpu"

    def close() -> None:
        if len(run) < _LEAST_TENSORS:
            others.extend(run)
        else:
            offsets = [load.promise.offset for load in run]
            groups.append(Group(run[0].promise.file, offsets, [load.target for load in run]))
        run.clear()

    start = end = 0
    file: Path | None = None
    for load in loads:
        if not (on_cpu and _needs_bytes_alone(load, dtype)):
            close()
            others.append(load)
            continue
        source: TensorSlice = load.promise
        offset, last = source.offset, source.offset + load.target.nbytes
        if run and (
            not 0 <= offset - end <= MOST_UNUSED_BYTES
            or last - start > PIECE_BYTES
            or len(run) == _MOST_TENSORS
            or (source.file is not file and source.file != file)
        ):
            close()
        if not run:
            start, file = offset, source.file
        run.append(load)
        end = last
    close()
    return groups, others


def _needs_bytes_alone(load: DeferredLoad, dtype: torch.dtype | None) -> bool:
    """Tell whether a CPU tensor is small, and its bytes in the file are its bytes in memory.

    Such a tensor keeps its dtype, and is contiguous in the file and in memory.
    """
    target, source = load.target, load.promise
    return (
        load.source is None
        and 0 < target.nbytes <= SMALL_BYTES
        and target.is_cpu
        and target.dtype == source.dtype
        and (dtype is None or target.dtype == dtype or not target.is_floating_point())
        and not source.parts
        and not source.encoding
        and target.is_contiguous()
        and bool(source.contiguous)
    )


def group_buffer_bytes(groups: Sequence[Group], threads: int | None) -> int:
    """Return the size in bytes of all threads' buffers together, for files that are not cached."""
    return sum(sorted(group.nbytes for group in groups)[-(threads or DISK_THREADS) :])


def fill_groups(groups: Sequence[Group], disk: DiskReaders) -> None:
    """Read the values of all groups; the first error ends the load.

    Args:
        disk: chooses the number of threads if the files are not cached.
    """
    if not groups:
        return
    with closing(PieceReader()) as reader:
        if _is_cached(groups, reader):
            readers = Readers(disk.threads or cache_threads())
        else:
            largest = max(groups, key=lambda group: group.nbytes)
            readers = disk.of(reader, largest.file, largest.start, largest.nbytes)
    waiting = deque(part for group in groups for part in group.parts(readers.piece_bytes))
    with one_thread_each, ThreadPoolExecutor(readers.threads) as pool:
        futures = [pool.submit(_fill_some, waiting, readers) for _ in range(readers.threads)]
        for future in futures:
            future.result()


def _is_cached(groups: Sequence[Group], reader: PieceReader) -> bool:
    return all(
        reader.opened(group.file).is_cached(group.start, group.nbytes)
        for group in groups[:: len(groups) // _MOST_PROBED + 1]
    )


def _fill_some(waiting: deque[Group], readers: Readers) -> None:
    with closing(PieceReader(None, readers.piece_bytes)) as reader:
        while waiting:
            try:
                group = waiting.popleft()
            except IndexError:  # another thread took the last group
                return
            places = [
                (offset, tensor.data_ptr(), tensor.nbytes)
                for offset, tensor in zip(group.offsets, group.tensors, strict=True)
            ]
            reader.scatter(group.file, places)
