"""Filling memory from stretches of files: what lies in it, and the threads that read it."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

import torch

from harness.checkpoint.direct import (
    BUFFER_BYTES,
    COPIED_BYTES,
    DISK_THREADS,
    PIECE_BYTES,
    PieceReader,
)
from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.lending import Lent, buffer_in, lend
from harness.checkpoint.memory import HUGE_PAGE_BYTES, allocate
from harness.checkpoint.pieces import Piece, PieceFiller, Runs, cut

READ_BYTES: Final = 16 * HUGE_PAGE_BYTES
"""How much a thread reads at once where nothing is converted: it takes the lock seldom."""

_MOST_CACHE_THREADS: Final = 4


class Fillable(Protocol):
    """Memory and the reads that fill it."""

    @property
    def memory(self) -> torch.Tensor:
        """Flat, on the final device: of the final dtype, or bytes where several tensors lie in it."""
        ...

    @property
    def converts(self) -> bool:
        """Whether a file holds another dtype."""
        ...

    @property
    def source_bytes(self) -> int:
        """How much is read of files."""
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

    @property
    def converts(self) -> bool:
        return self.memory.dtype != self.slices[0].dtype

    @property
    def source_bytes(self) -> int:
        return self.memory.numel() * self.slices[0].dtype.itemsize

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
    first, (start, end) = slices[0], span(slices)
    kind = final_dtype(first, dtype)
    memory = own_memory(slices, targets, device, kind)
    if memory is None:
        numel = (end - start) // first.dtype.itemsize
        memory = allocate(numel, kind, device, start if kind == first.dtype else 0)
    return Stretch(tuple(slices), start, memory)


def final_dtype(one: TensorSlice, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a tensor is to be where all floating-point tensors are to be ``dtype``."""
    return dtype if dtype and one.dtype.is_floating_point else one.dtype


def span(slices: Sequence[TensorSlice]) -> tuple[int, int]:
    """Return from where to where in the file the elements lie of slices that share a storage."""
    start = min(one.offset for one in slices)
    return start, max(one.offset + _extent_bytes(one) for one in slices)


def own_memory(
    slices: Sequence[TensorSlice],
    targets: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the memory, flat, of the target that is called as the slices, if it can be filled as it is."""
    own = targets.get(slices[0].name)
    if own is None or not is_ready(own, device, dtype) or not _is_plain(slices):
        return None
    return own.detach().view(-1)


def is_ready(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a tensor's own memory can be filled as it is."""
    return (tensor.device, tensor.dtype) == (device, dtype) and tensor.is_contiguous()


@contextmanager
def being_filled(stretches: Sequence[Fillable], threads: int | None) -> Iterator[None]:
    """Read all stretches into their memory while the block runs; its end waits for the last.

    The first error, here or in the block, ends it. Whoever runs Python meanwhile is held up by each
    read for a moment, and each read by him. Torch computes on one thread at a time, here and in the
    block.

    Args:
        threads: how many read; None: as many as suit what is cached.
    """
    if not stretches:
        yield
        return
    cached = begin_cached(stretches)
    threads = threads or (_cache_threads() if cached else DISK_THREADS)
    lent = Lent((), copies(stretches, threads)) if cached else lend(stretches, READ_BYTES, threads)
    runs = Runs(lent.borrowers, READ_BYTES)
    failed = threading.Event()

    def work(lender: Piece | None) -> None:
        with PieceFiller(buffer_in(lender) if lender else None) as filler:
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

    with _one_thread_each(), ThreadPoolExecutor(threads) as pool:
        lenders = [*lent.lenders, *[None] * threads][:threads]
        futures = [pool.submit(work_or_fail, lender) for lender in lenders]
        try:
            yield
        except BaseException:
            failed.set()
            raise
        for future in futures:
            future.result()


def copies(stretches: Iterable[Fillable], threads: int) -> Iterator[Piece]:
    """Yield the reads of what is cached: equal shares where each thread has enough to copy at once."""
    for one in stretches:
        shares = one.memory.nbytes // (threads * COPIED_BYTES) * threads
        if one.converts or not shares:
            yield from one.pieces(READ_BYTES)
        else:
            pages = ceil(one.memory.nbytes / shares / HUGE_PAGE_BYTES)
            yield from one.pieces(pages * HUGE_PAGE_BYTES)


def _cache_threads() -> int:
    """Return how many threads copy what is cached: two that share a processor hold each other up."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    processors = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(_MOST_CACHE_THREADS, processors)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from starting threads for each of ours, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def begin_cached(stretches: Sequence[Fillable]) -> bool:
    """Tell whether the page cache holds the front of the largest stretch, of at least one."""
    largest = max(stretches, key=lambda one: one.memory.nbytes)
    first = next(largest.pieces(READ_BYTES), None)
    if first is None:
        return True
    with closing(PieceReader()) as reader:
        return reader.is_cached(first.source.file, first.offset, first.source_bytes)


def buffer_bytes(stretches: Iterable[Fillable], threads: int | None, *, gpu: bool) -> int:
    """Return the most memory that filling holds beside the stretches, in bytes: of all threads."""
    threads = threads or DISK_THREADS
    read = (one.source_bytes for one in stretches)
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
