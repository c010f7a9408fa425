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
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from threading import Event, Lock
from typing import Final, NamedTuple

import torch

from weighin.stream.bytes import (
    HUGE_PAGE_BYTES,
    PIECE_BYTES,
    Disk,
    Reader,
    Readers,
    address_of,
    allocate,
    memory_of,
)
from weighin.stream.slices import Fill, Slice, row_major

# Of reads that convert no dtype: so large that threads seldom wait for the lock of the queue of reads.
READ_BYTES: Final = 16 * HUGE_PAGE_BYTES
_MOST_PIECE_BYTES: Final = 4 * PIECE_BYTES
_BUFFERS_SHARE: Final = 1 / 200  # of the bytes to read, for the buffers of all threads


class _Piece(NamedTuple):
    """One read from ``offset`` on fills ``target``, or ``spread``, a tensor with gaps in the file."""

    file: Path
    dtype: torch.dtype
    offset: int
    target: torch.Tensor
    spread: Slice | None = None

    @property
    def size(self) -> int:
        return self.target.numel() * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are those of the target."""
        target = self.target
        return target.dtype == self.dtype and target.is_cpu and target.is_contiguous()


def fill(fills: Sequence[Fill], disk: Disk) -> None:
    """Fill all tensors; the first error ends the load."""
    stored = [block for one in fills if one.where.fill is None for block in blocks(one)]
    if stored:
        stored.sort(key=lambda one: (str(one.where.file), one.where.offset))
        total_bytes = sum(_span_bytes(one.where) for one in stored)
        readers = _readers(stored, disk, total_bytes)
        most_bytes = readers.piece_bytes if readers.late else READ_BYTES
        threads = min(readers.threads, 1 + total_bytes // readers.piece_bytes)
        pieces = _pieces(stored, most_bytes, readers.piece_bytes)
        _on_threads(threads, _runs(pieces, readers.piece_bytes), readers.piece_bytes)
    if computed := [one for one in fills if one.where.fill is not None]:
        computed.sort(key=lambda one: one.out.nbytes, reverse=True)
        threads = min(disk.threads or cache_threads(), cache_threads())
        _on_threads(threads, iter(computed), PIECE_BYTES)


def cache_threads() -> int:
    """Return the number of threads that copy cached files: one per available processor, at most 4."""
    return min(4, len(os.sched_getaffinity(0)))


def piece_bytes_of(total_bytes: int, threads: int) -> int:
    """Return the size of each thread's buffer. Larger buffers are faster, and a large model has room.

    ``predict/patches.py`` computes what the buffers of all threads take together.
    """
    room = int(total_bytes * _BUFFERS_SHARE / threads)
    return min(max(PIECE_BYTES, room), _MOST_PIECE_BYTES)


def file_order(where: Slice) -> list[int] | None:
    """Return the dimensions in the file's order, outermost first; None if elements have gaps or overlap."""
    if where.contiguous:
        return list(range(len(where.shape)))
    order = sorted(range(len(where.shape)), key=lambda n: (-where.stride[n], n))
    shape, stride = (tuple(values[n] for n in order) for values in (where.shape, where.stride))
    steps = zip(shape, stride, row_major(shape), strict=True)
    return order if all(size == 1 or step == dense for size, step, dense in steps) else None


def dense_stride(where: Slice) -> tuple[int, ...]:
    """Return the strides of a tensor in memory: the file's, if the tensor has no gaps in the file."""
    if not where.parts and file_order(where) is not None:
        return where.stride
    return row_major(where.shape)


def part_of(where: Slice, view: torch.Tensor) -> Slice | None:
    """Return where the file stores a view; None unless this is one block, in the view's dtype."""
    stride, dense = view.stride(), dense_stride(where)
    if view.dtype != where.dtype:
        return None
    if (tuple(view.shape), stride) == (where.shape, dense) and not view.storage_offset():
        return where
    if where.parts or where.fill or dense != where.stride:
        return None
    offset = where.offset + int(view.storage_offset()) * view.element_size()
    return replace(where, shape=tuple(view.shape), stride=stride, offset=offset)


def empty(where: Slice, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory for a tensor that a read will fill."""
    offset = where.offset if dtype == where.dtype else 0
    flat = allocate(prod(where.shape), dtype, device, offset)
    return flat.as_strided(where.shape, dense_stride(where))


def _on_threads(threads: int, jobs: "Iterator[list[_Piece] | Fill]", piece_bytes: int) -> None:
    lock, failed = Lock(), Event()

    def work() -> None:
        with closing(_Filler(piece_bytes)) as filler:
            try:
                while not failed.is_set():
                    with lock:
                        job = next(jobs, None)
                    if job is None:
                        return
                    filler.fill(job)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(threads, initializer=_compute_alone) as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            failed.set()
            raise


@cache  # each CDLL is cyclic garbage, and no garbage is collected during a load
def _openmp() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _compute_alone() -> None:
    """Let torch compute on this thread alone: ``torch.set_num_threads`` would apply to the whole process."""
    torch.get_num_threads()  # else torch sets the number of this thread at its first operation
    with suppress(OSError, AttributeError):  # torch without OpenMP
        _openmp().omp_set_num_threads(1)


def blocks(one: Fill) -> Iterator[Fill]:
    """Yield each stored block of a tensor, with the part of the tensor that receives the block."""
    if not one.where.parts:
        if one.out.numel():
            yield one
        return
    for part in one.where.parts:
        sides = zip(part.start, part.shape, strict=True)
        target = one.out[tuple(slice(at, at + size) for at, size in sides)]
        yield from blocks(Fill(part, target))


def _span_bytes(where: Slice) -> int:
    return where.span * where.dtype.itemsize


def _readers(fills: Sequence[Fill], disk: Disk, total_bytes: int) -> Readers:
    """Return the number of threads: few if at least 3/4 of the bytes of some tensors are cached."""
    with closing(Reader()) as reader:
        cached_bytes, all_bytes = 0.0, 0
        for where, _ in fills[:: len(fills) // 16 + 1]:
            size = min(_span_bytes(where), READ_BYTES)
            cached_bytes += reader.cached_share(where.file, where.offset, size) * size
            all_bytes += size
        if cached_bytes >= 0.75 * all_bytes:  # the kernel may reclaim single pages
            return Readers(disk.threads or cache_threads())
        file = max((one.where for one in fills), key=_span_bytes).file
        inside = [one.where for one in fills if one.where.file == file]
        start, end = inside[0].offset, max(one.offset + _span_bytes(one) for one in inside)
        readers = disk.readers(reader, file, start, end - start)
        if readers.late:
            return readers
        return readers._replace(piece_bytes=piece_bytes_of(total_bytes, readers.threads))


def _pieces(fills: Iterable[Fill], most_bytes: int, piece_bytes: int) -> Iterator[_Piece]:
    """Yield reads of at most ``most_bytes`` straight into memory, and ``piece_bytes`` through a buffer."""
    for where, out in fills:
        whole = _Piece(where.file, where.dtype, where.offset, out)
        if where.contiguous:
            yield from _cut(whole, most_bytes, piece_bytes)
        elif (order := file_order(where)) is not None:
            yield from _cut(whole._replace(target=out.permute(order)), most_bytes, piece_bytes)
        else:
            yield whole._replace(spread=where)


def _cut(whole: _Piece, most_bytes: int, piece_bytes: int) -> Iterator[_Piece]:
    file, dtype, offset, target, _ = whole
    size, item = dtype.itemsize, max(dtype.itemsize, target.dtype.itemsize)
    count = target.numel()
    if not target.is_contiguous():
        row = count // len(target)
        rows = piece_bytes // (row * item)
        for first in range(0, len(target), rows or 1):
            part = target[first : first + rows] if rows else target[first]
            piece = _Piece(file, dtype, offset + first * row * size, part)
            yield from [piece] if rows else _cut(piece, most_bytes, piece_bytes)
        return
    if not whole.is_plain:
        # Several reads through a buffer fill one huge page: if two threads touched it, both would clear it.
        most_bytes = min(HUGE_PAGE_BYTES, most_bytes) if target.is_cpu else piece_bytes
    most = most_bytes // item
    if count <= most:
        yield whole
        return
    flat, width, first = target.view(-1), target.dtype.itemsize, 0
    start, page = (target.data_ptr() if target.is_cpu else 0), min(HUGE_PAGE_BYTES, most * width)
    while first < count:
        last = first + most
        last = count if last >= count else last - (start + last * width) % page // width
        yield _Piece(file, dtype, offset + first * size, flat[first:last])
        first = last


def _runs(pieces: Iterable[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Yield pieces, together if they adjoin in a file and one read of ``most_bytes`` can fill them."""
    run: list[_Piece] = []
    end = 0
    for piece in pieces:
        piece_end = piece.offset + piece.size
        if run:
            first = run[0]
            follows = (
                0 <= piece.offset - end <= 4096  # bytes of the file that are read in vain
                and piece_end - first.offset <= most_bytes
                and piece.target.is_cpu
                and first.target.is_cpu
                and piece.spread is first.spread is None
                and (piece.file is first.file or piece.file == first.file)
            )
            if not follows:
                yield run
                run = []
        run.append(piece)
        end = piece_end
    if run:
        yield run


class _Filler:
    """Fills tensors on one thread, with a reader and, for a GPU, pinned buffers."""

    def __init__(self, piece_bytes: int) -> None:
        self._reader = Reader(piece_bytes)
        self._gpu: _GpuCopier | None = None

    def close(self) -> None:
        self._reader.close()
        if self._gpu:
            self._gpu.finish()

    @torch.no_grad()
    def fill(self, job: list[_Piece] | Fill) -> None:
        if isinstance(job, Fill):
            assert job.where.fill
            job.where.fill(job.out)
            return
        first, last = job[0], job[-1]
        if len(job) == 1:
            self._fill_one(first)
            return
        size = last.offset + last.size - first.offset
        content = self._reader.piece(first.file, first.offset, size)
        start = address_of(content)
        for one in job:
            at, size = one.offset - first.offset, one.size
            if one.is_plain:
                ctypes.memmove(one.target.data_ptr(), start + at, size)
            else:
                _convert(content[at : at + size], one.dtype, one.target)

    def _fill_one(self, piece: _Piece) -> None:
        file, dtype, offset, target, where = piece
        if where is not None:
            flat = torch.empty(where.span, dtype=dtype)
            self._reader.read(file, memory_of(flat), offset)
            target.copy_(flat.as_strided(where.shape, where.stride))
        elif piece.is_plain:
            self._reader.read(file, memory_of(target), offset)
        elif target.is_cuda:
            self._gpu = self._gpu or _GpuCopier(target.device, self._reader.piece_bytes)
            with self._gpu.copying_to(target) as pinned:
                self._fill_one(piece._replace(target=pinned))
        elif not target.is_contiguous():
            _convert(self._reader.piece(file, offset, piece.size), dtype, target)
        else:
            for part in target.view(-1).split(self._reader.piece_bytes // dtype.itemsize):
                size = part.numel() * dtype.itemsize
                _convert(self._reader.piece(file, offset, size), dtype, part)
                offset += size


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
