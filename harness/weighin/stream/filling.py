"""Fill tensors from a checkpoint's files, on several threads, in pieces.

A tensor whose bytes are those of the file is read straight into its memory, by large reads. A tensor
whose dtype changes, or whose elements lie otherwise in memory than in the file, passes through the
buffer of a thread. Values for a GPU pass through two pinned buffers of each thread. One read fills
hundreds of small tensors, because with many of them function calls take most of the load time.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path
from threading import Event, Lock
from typing import Final, NamedTuple

import torch

from weighin.stream.bytes import (
    ALIGNMENT,
    DISK_THREADS,
    HUGE_PAGE_BYTES,
    PIECE_BYTES,
    Disk,
    Reader,
    Readers,
    address_of,
    allocate,
    memory_of,
)
from weighin.stream.slices import Slice, row_major

READ_BYTES: Final = 16 * HUGE_PAGE_BYTES
"""The size in bytes of a thread's reads if no dtype is converted. The reads are large so that threads
seldom wait for the lock of the queue from which they take the reads."""

_MOST_CACHE_THREADS: Final = 4
_MOST_PROBED: Final = 16  # tensors
_MOSTLY: Final = 0.75
_MOST_PIECE_BYTES: Final = 4 * PIECE_BYTES
_BUFFERS_SHARE: Final = 1 / 200  # of the bytes to read, for the buffers of all threads
_MOST_UNUSED_BYTES: Final = 4096  # of the file, between two tensors of one read


class Fill(NamedTuple):
    """A tensor to fill, and its source in a checkpoint.

    Attributes:
        where: the tensor in the checkpoint.
        out: the tensor to fill, of the same shape, in any dtype and on any device.
    """

    where: Slice
    out: torch.Tensor


class _Piece(NamedTuple):
    """One read: the file's elements from ``offset`` on fill ``target``, in row-major order.

    Attributes:
        spread: the whole tensor, if its elements lie in the file with gaps, or overlap.
    """

    file: Path
    dtype: torch.dtype
    offset: int
    target: torch.Tensor
    end: int
    plain: bool
    spread: Slice | None = None


def fill(fills: Sequence[Fill], disk: Disk) -> None:
    """Fill all tensors; the first error ends the load.

    Args:
        disk: chooses the number of threads if the files are not cached.
    """
    stored = [block for one in fills if one.where.fill is None for block in _blocks(one)]
    if stored:
        stored.sort(key=lambda one: one.where.read_order)
        total_bytes = sum(_span_bytes(one.where) for one in stored)
        readers = _readers(stored, disk, total_bytes)
        most_bytes = readers.piece_bytes if readers.late else READ_BYTES
        threads = min(readers.threads, 1 + total_bytes // readers.piece_bytes)
        lock, failed = Lock(), Event()
        runs = _runs(_pieces(stored, most_bytes, readers.piece_bytes), readers.piece_bytes)

        def work() -> None:
            filler = _Filler(readers.piece_bytes)
            try:
                while not failed.is_set():
                    with lock:
                        run = next(runs, None)
                    if run is None:
                        return
                    filler.fill(run)
            except BaseException:
                failed.set()
                raise
            finally:
                filler.close()

        with ThreadPoolExecutor(threads, initializer=_compute_alone) as pool:
            futures = [pool.submit(work) for _ in range(threads)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                failed.set()
                raise
    computed = [one for one in fills if one.where.fill is not None]
    if computed:
        computed.sort(key=lambda one: one.out.nbytes, reverse=True)
        threads = min(disk.threads or cache_threads(), cache_threads())
        with ThreadPoolExecutor(threads, initializer=_compute_alone) as pool:
            futures = [pool.submit(one.where.fill, one.out) for one in computed if one.where.fill]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def cache_threads() -> int:
    """Return the number of threads that copy cached files: one per available processor, at most 4."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    processors = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(_MOST_CACHE_THREADS, processors)


def buffer_bytes(fills: Iterable[Fill], threads: int | None) -> int:
    """Return the largest size in bytes that the buffers of all threads together can have."""
    threads, used, total = threads or DISK_THREADS, 0, 0
    for where, out in fills:
        is_straight = out.dtype == where.dtype and out.nbytes > PIECE_BYTES and not where.parts
        used += 4 * ALIGNMENT if is_straight else where.nbytes
        total += where.nbytes
    return min(threads * (piece_bytes_of(total, threads) + 3 * ALIGNMENT), used)


def piece_bytes_of(total_bytes: int, threads: int) -> int:
    """Return the size of a thread's buffer: larger ones are faster, and a large model has room for them."""
    room = int(total_bytes * _BUFFERS_SHARE / threads)
    return min(max(PIECE_BYTES, room), _MOST_PIECE_BYTES)


def file_order(where: Slice) -> list[int] | None:
    """Return the dimensions in the order in which the file stores them, the outermost first.

    ``file_order`` returns None if there are gaps between the elements, or the elements overlap.
    """
    if where.contiguous:
        return list(range(len(where.shape)))
    order = sorted(range(len(where.shape)), key=lambda n: (-where.stride[n], n))
    shape, stride = (tuple(values[n] for n in order) for values in (where.shape, where.stride))
    steps = zip(shape, stride, row_major(shape), strict=True)
    return order if all(size == 1 or step == dense for size, step, dense in steps) else None


@cache
def _openmp() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _compute_alone() -> None:
    """Let torch compute on this thread alone, without a pool of threads for each reading thread.

    ``torch.set_num_threads`` would apply to the whole process.
    """
    torch.get_num_threads()  # else torch sets the number of this thread at its first operation
    with suppress(OSError, AttributeError):  # torch without OpenMP
        _openmp().omp_set_num_threads(1)


def _blocks(one: Fill) -> Iterator[Fill]:
    """Yield each stored block of a tensor, with the part of the tensor that receives the block."""
    if not one.where.parts:
        if one.out.numel():
            yield one
        return
    for part in one.where.parts:
        sides = zip(part.start, part.shape, strict=True)
        target = one.out[tuple(slice(at, at + size) for at, size in sides)]
        yield from _blocks(Fill(part, target))


def _readers(fills: Sequence[Fill], disk: Disk, total_bytes: int) -> Readers:
    """Return the number of threads: few if at least 3/4 of the bytes of some tensors are cached.

    One quarter may be missing, because the kernel may reclaim single pages of a cached file.
    """
    with closing(Reader()) as reader:
        cached_bytes, all_bytes = 0.0, 0
        for where, _ in fills[:: len(fills) // _MOST_PROBED + 1]:
            size = min(_span_bytes(where), READ_BYTES)
            cached_bytes += reader.cached_share(where.file, where.offset, size) * size
            all_bytes += size
        if cached_bytes >= _MOSTLY * all_bytes:
            return Readers(disk.threads or cache_threads())
        file = max((one.where for one in fills), key=_span_bytes).file
        inside = [one.where for one in fills if one.where.file == file]
        start, end = inside[0].offset, max(one.offset + _span_bytes(one) for one in inside)
        readers = disk.readers(reader, file, start, end - start)
        if readers.late:
            return readers
        return readers._replace(piece_bytes=piece_bytes_of(total_bytes, readers.threads))


def _span_bytes(where: Slice) -> int:
    return where.span * where.dtype.itemsize


def _pieces(fills: Iterable[Fill], most_bytes: int, piece_bytes: int) -> Iterator[_Piece]:
    """Yield the reads of tensors.

    Args:
        most_bytes: the largest size of a read straight into memory.
        piece_bytes: the largest size of a read through a buffer.
    """
    for where, out in fills:
        file, dtype, offset = where.file, where.dtype, where.offset
        if where.contiguous:
            target = out
        elif (order := file_order(where)) is not None:
            target = out.permute(order)
        else:
            yield _Piece(file, dtype, offset, out, offset, plain=False, spread=where)
            continue
        yield from _cut(file, dtype, offset, target, most_bytes, piece_bytes)


def _cut(
    file: Path,
    dtype: torch.dtype,
    offset: int,
    target: torch.Tensor,
    most_bytes: int,
    piece_bytes: int,
) -> Iterator[_Piece]:
    size, item = dtype.itemsize, max(dtype.itemsize, target.dtype.itemsize)
    on_cpu, count = target.is_cpu, target.numel()
    if not target.is_contiguous():
        row = count // len(target)
        rows = piece_bytes // (row * item)
        for first in range(0, len(target), rows or 1):
            at = offset + first * row * size
            if rows:
                part = target[first : first + rows]
                yield _Piece(file, dtype, at, part, at + part.numel() * size, plain=False)
            else:
                yield from _cut(file, dtype, at, target[first], most_bytes, piece_bytes)
        return
    plain = on_cpu and target.dtype == dtype
    # Several reads through a buffer fill one huge page: if two threads touched it, both would clear it.
    most = (
        most_bytes if plain else min(HUGE_PAGE_BYTES, most_bytes) if on_cpu else piece_bytes
    ) // item
    if count <= most:
        yield _Piece(file, dtype, offset, target, offset + count * size, plain)
        return
    flat, width, first = target.view(-1), target.dtype.itemsize, 0
    start, page = (target.data_ptr() if on_cpu else 0), min(HUGE_PAGE_BYTES, most * width)
    while first < count:
        last = first + most
        last = count if last >= count else last - (start + last * width) % page // width
        at, end = offset + first * size, offset + last * size
        yield _Piece(file, dtype, at, flat[first:last], end, plain)
        first = last


def _runs(pieces: Iterable[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Yield pieces, together if they adjoin in a file and one read of ``most_bytes`` can fill them."""
    run: list[_Piece] = []
    for piece in pieces:
        if run:
            first, last = run[0], run[-1]
            follows = (
                0 <= piece.offset - last.end <= _MOST_UNUSED_BYTES
                and piece.end - first.offset <= most_bytes
                and piece.target.is_cpu
                and first.target.is_cpu
                and piece.spread is first.spread is None
                and (piece.file is first.file or piece.file == first.file)
            )
            if not follows:
                yield run
                run = []
        run.append(piece)
    if run:
        yield run


class _Filler:
    """Fills runs of pieces on one thread, with a reader and, for a GPU, pinned buffers."""

    def __init__(self, piece_bytes: int) -> None:
        self._reader = Reader(piece_bytes)
        self._gpu: _GpuCopier | None = None

    def close(self) -> None:
        self._reader.close()
        if self._gpu:
            self._gpu.finish()

    @torch.no_grad()
    def fill(self, run: Sequence[_Piece]) -> None:
        first = run[0]
        if len(run) == 1:
            self._fill_one(first)
        else:
            content = self._reader.piece(first.file, first.offset, run[-1].end - first.offset)
            start = address_of(content) - first.offset
            for one in run:
                if one.plain:
                    size = one.end - one.offset
                    ctypes.memmove(one.target.data_ptr(), start + one.offset, size)
                else:
                    part = content[one.offset - first.offset : one.end - first.offset]
                    _convert(part, one.dtype, one.target)

    def _fill_one(self, piece: _Piece) -> None:
        file, dtype, target = piece.file, piece.dtype, piece.target
        if piece.spread is not None:
            where = piece.spread
            flat = torch.empty(where.span, dtype=dtype)
            self._reader.read(file, memory_of(flat), piece.offset)
            target.copy_(flat.as_strided(where.shape, where.stride))
        elif piece.plain:
            self._reader.read(file, memory_of(target), piece.offset)
        elif target.is_cuda:
            self._gpu = self._gpu or _GpuCopier(target.device, self._reader.piece_bytes)
            with self._gpu.copying_to(target) as pinned:
                plain = pinned.dtype == dtype
                self._fill_one(piece._replace(target=pinned, plain=plain))
        elif not target.is_cpu:
            values = torch.empty(target.shape, dtype=dtype)
            self._fill_one(piece._replace(target=values, plain=True))
            target.copy_(values)
        elif not target.is_contiguous():
            content = self._reader.piece(file, piece.offset, piece.end - piece.offset)
            _convert(content, dtype, target)
        else:
            flat, count = target.view(-1), self._reader.piece_bytes // dtype.itemsize
            for first in range(0, len(flat), count):
                part = flat[first : first + count]
                at, size = piece.offset + first * dtype.itemsize, len(part) * dtype.itemsize
                _convert(self._reader.piece(file, at, size), dtype, part)


def _convert(content: memoryview, dtype: torch.dtype, target: torch.Tensor) -> None:
    """Convert the elements in ``content`` to the target's dtype, and write them to the target."""
    flat = torch.frombuffer(content, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    target.copy_(flat.view(dtype).view(target.shape))


class _GpuCopier:
    """Copies to the GPU through two pinned buffers: one is filled while the other is copied."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._stream = torch.cuda.Stream(device)
        # The current stream has allocated the target.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        self._copied = [torch.cuda.Event() for _ in "ab"]
        self._turn = 0

    @contextmanager
    def copying_to(self, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a pinned tensor to fill, and then start its copy to ``target`` without waiting."""
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].synchronize()
        pinned = self._buffers[turn][: target.nbytes].view(target.dtype).view(target.shape)
        yield pinned
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            self._copied[turn].record(self._stream)

    def finish(self) -> None:
        """Wait until all started copies are complete."""
        self._stream.synchronize()


def dense_stride(where: Slice) -> tuple[int, ...]:
    """Return the strides of a tensor in memory: the file's, if the tensor has no gaps in the file."""
    return (
        where.stride
        if not where.parts and file_order(where) is not None
        else row_major(where.shape)
    )


def empty(where: Slice, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a tensor, to be read into."""
    count, offset = prod(where.shape), where.offset if dtype == where.dtype else 0
    flat = allocate(count, dtype, device, offset)
    return flat.as_strided(where.shape, dense_stride(where))
