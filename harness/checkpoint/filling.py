"""Filling memory from stretches of files: what lies in it, and the threads that read it."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

import torch

from harness.checkpoint.direct import BUFFER_BYTES, DISK_THREADS, PIECE_BYTES, PieceReader
from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.lending import LENT_BYTES, lend
from harness.checkpoint.memory import HUGE_PAGE_BYTES, allocate
from harness.checkpoint.pieces import Piece, PieceFiller, cut, in_runs

READ_BYTES: Final = 16 * HUGE_PAGE_BYTES
"""How much a thread reads at once where nothing is converted: it takes the lock seldom."""

_CACHE_THREADS: Final = 4  # more than a small machine's cores: some of it may not be cached


class Fillable(Protocol):
    """Memory and the reads that fill it: what ``fill`` takes."""

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        """What lies in it, under all its names."""
        ...

    @property
    def memory(self) -> torch.Tensor:
        """Flat, of the final dtype, on the final device."""
        ...

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor over the memory."""
        ...

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the reads to make, none into more memory than that."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """One stretch of a file and the memory that it fills: a tensor, or several that share it.

    ``memory`` is flat, of the final dtype, on the final device.
    """

    slices: tuple[TensorSlice, ...]
    start: int
    memory: torch.Tensor

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor over the memory."""
        for one in self.slices:
            at = (one.offset - self.start) // one.dtype.itemsize
            yield one.name, self.memory.as_strided(one.shape, one.stride, at)

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the reads to make, none into more memory than that."""
        yield from cut(self.slices[0], self.start, self.memory, most_bytes)


def prepare(
    slices: Sequence[TensorSlice],
    targets: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Stretch:
    """Return the stretch that holds ``slices``, which share a storage, with memory to fill.

    That is the target's own memory where there is one, a plain tensor of the right kind; else fresh.
    """
    first = slices[0]
    start = min(one.offset for one in slices)
    end = max(one.offset + _extent_bytes(one) for one in slices)
    kind = dtype if dtype and first.dtype.is_floating_point else first.dtype
    own = targets.get(first.name)
    if own is not None and is_ready(own, device, kind) and _is_plain(slices):
        memory = own.detach().view(-1)
    else:
        numel = (end - start) // first.dtype.itemsize
        memory = allocate(numel, kind, device, start if kind == first.dtype else 0)
    return Stretch(tuple(slices), start, memory)


def is_ready(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a tensor's own memory can be filled as it is."""
    return (tensor.device, tensor.dtype) == (device, dtype) and tensor.is_contiguous()


def fill(stretches: Sequence[Fillable], threads: int | None) -> None:
    """Read all stretches into their memory; the first error ends it.

    Args:
        threads: how many read; None: as many as suit what is cached.
    """
    largest = max(stretches, key=lambda one: one.memory.nbytes, default=None)
    if largest is None or begins_cached(largest):
        _fill(stretches, threads or _CACHE_THREADS, READ_BYTES)
        return
    lent = lend(stretches, threads or DISK_THREADS)
    _fill(lent.borrowers, threads or DISK_THREADS, READ_BYTES, lent.buffers)
    if lent.lenders:
        _fill(lent.lenders, threads or DISK_THREADS, LENT_BYTES)


def _fill(
    stretches: Iterable[Fillable],
    threads: int,
    most_bytes: int,
    buffers: Sequence[memoryview] = (),
) -> None:
    with being_filled(stretches, threads, most_bytes, buffers):
        pass


@contextmanager
def being_filled(
    stretches: Iterable[Fillable],
    threads: int,
    most_bytes: int,
    buffers: Sequence[memoryview] = (),
) -> Iterator[None]:
    """Read all stretches into their memory while the block runs, on so many threads.

    The first error, here or in the block, ends it. Whoever runs Python meanwhile is held up by each
    read for a moment, and each read by him: for a block that does, let the reads be few and large.
    Meanwhile torch computes on one thread at a time, here and in the block.

    Args:
        most_bytes: that one read fills.
        buffers: for what is converted, one for each thread; who gets none has a small one of his own.
    """
    pieces = (piece for stretch in stretches for piece in stretch.pieces(most_bytes))
    runs = in_runs(pieces, most_bytes)
    lock, failed = threading.Lock(), threading.Event()

    def work(buffer: memoryview | None) -> None:
        with PieceFiller(buffer) as filler:
            while not failed.is_set():
                with lock:
                    run = next(runs, None)
                if run is None:
                    return
                try:
                    filler.fill(run)
                except BaseException:
                    failed.set()
                    raise

    own = [*buffers, *[None] * threads][:threads]
    with _one_thread_each(), ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, buffer) for buffer in own]
        try:
            yield
        except BaseException:
            failed.set()
            raise
        for future in futures:
            future.result()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from starting threads for each of ours, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def begins_cached(stretch: Fillable) -> bool:
    """Tell whether the page cache holds what would be read first."""
    first = next(stretch.pieces(READ_BYTES), None)
    if first is None:
        return True
    with closing(PieceReader()) as reader:
        return reader.is_cached(first.source.file, first.offset, first.source_bytes)


def buffer_bytes(stretches: Iterable[Fillable], threads: int | None, *, gpu: bool) -> int:
    """Return the most memory that ``fill`` holds beside the stretches, in bytes: of all threads."""
    threads = threads or DISK_THREADS
    read = (one.memory.numel() * one.slices[0].dtype.itemsize for one in stretches)
    used = sum(min(size, ceil(size / READ_BYTES) * BUFFER_BYTES) for size in read)
    pinned = threads * 2 * PIECE_BYTES if gpu else 0
    return min(threads * BUFFER_BYTES, used) + pinned


def _extent_bytes(one: TensorSlice) -> int:
    """Return how many bytes lie from a tensor's first element to the end of its last."""
    if 0 in one.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(one.shape, one.stride, strict=True))
    return (last + 1) * one.dtype.itemsize


def _is_plain(slices: Sequence[TensorSlice]) -> bool:
    """Tell whether all names are the same contiguous tensor."""
    first = slices[0]
    same = all((one.offset, one.shape) == (first.offset, first.shape) for one in slices)
    return same and all(one.contiguous for one in slices)
