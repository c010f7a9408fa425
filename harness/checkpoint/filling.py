"""Filling memory from stretches of files: pieces, the threads that read them, and where they go."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from harness.checkpoint.direct import BUFFER_BYTES, DISK_THREADS, PIECE_BYTES, PieceReader
from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.lending import LENT_BYTES, lend
from harness.checkpoint.memory import HUGE_PAGE_BYTES, allocate, memory_of
from harness.checkpoint.shrinking import read_shrinking, shrinks
from harness.checkpoint.window import WINDOW_BYTES

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

    def pieces(self, most_bytes: int) -> Iterator["Piece"]:
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

    def pieces(self, most_bytes: int) -> Iterator["Piece"]:
        """Yield the reads to make, none into more memory than that."""
        yield from cut(self.slices[0], self.start, self.memory, most_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One read: ``target`` is filled, in row-major order, with what lies at ``offset``."""

    source: TensorSlice
    offset: int
    target: torch.Tensor

    @property
    def source_bytes(self) -> int:
        return self.target.numel() * self.source.dtype.itemsize

    def parts(self, most_bytes: int) -> Iterator["Piece"]:
        """Yield this read in parts of which none takes more than ``most_bytes`` of the file."""
        if self.source_bytes <= most_bytes:
            yield self
            return
        size = self.source.dtype.itemsize
        count = most_bytes // size
        for number, part in enumerate(torch.split(self.target.view(-1), count)):
            yield Piece(self.source, self.offset + number * count * size, part)


def cut(source: TensorSlice, offset: int, target: torch.Tensor, most_bytes: int) -> Iterator[Piece]:
    """Yield the reads that fill a contiguous ``target`` with what lies at ``offset``.

    They are cut where its huge pages are: two threads that touch one at once would both clear it.
    On a GPU none outgrows a pinned buffer.
    """
    flat, size, start = target.view(-1), target.dtype.itemsize, target.data_ptr()
    most = min(PIECE_BYTES, most_bytes) if target.is_cuda else most_bytes
    page = min(HUGE_PAGE_BYTES, most)
    first = 0
    while first < len(flat):
        end = (start + first * size + most) // page * page
        last = min((end - start) // size, len(flat))
        yield Piece(source, offset + first * source.dtype.itemsize, flat[first:last])
        first = last


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
    lock, failed = threading.Lock(), threading.Event()

    def work(buffer: memoryview | None) -> None:
        with _Reader(buffer) as reader:
            while not failed.is_set():
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                try:
                    reader.read(piece)
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


def buffer_bytes(threads: int | None, *, gpu: bool) -> int:
    """Return the most memory that ``fill`` holds beside the stretches, in bytes: of all threads."""
    return (threads or DISK_THREADS) * (BUFFER_BYTES + (2 * PIECE_BYTES if gpu else 0))


class _Reader:
    """What one thread needs to read pieces: a reader of files, and a way to the GPU."""

    def __init__(self, buffer: memoryview | None) -> None:
        self._pieces = PieceReader(buffer)
        self._borrows = buffer is not None
        self._gpu: _GpuCopier | None = None

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.close()
        if self._gpu:
            self._gpu.finish()

    def read(self, piece: Piece) -> None:
        """Read one piece into place, converted and copied to the GPU where it must be."""
        if piece.target.is_cuda:
            self._gpu = self._gpu or _GpuCopier(piece.target.device)
            with self._gpu.copying_to(piece.target) as pinned:
                self._read(Piece(piece.source, piece.offset, pinned))
        else:
            self._read(piece)

    def _read(self, piece: Piece) -> None:
        source, offset, target = piece.source, piece.offset, piece.target
        if target.dtype == source.dtype and target.is_contiguous():
            self._pieces.read(source.file, memory_of(target), offset)
        elif offset % source.dtype.itemsize:
            self._convert_copies(piece)  # what lies odd is copied before it is read as numbers
        elif self._pieces.is_cached(source.file, offset, piece.source_bytes):
            for part in piece.parts(WINDOW_BYTES):
                with self._pieces.looking(source.file, part.offset, part.source_bytes) as found:
                    _convert(part, found)
        elif not self._borrows and shrinks(source, target):
            done = read_shrinking(self._pieces, source, offset, target)
            offset += done * source.dtype.itemsize
            self._convert_copies(Piece(source, offset, target.view(-1)[done:]))
        else:
            self._convert_copies(piece)

    def _convert_copies(self, piece: Piece) -> None:
        for part in piece.parts(self._pieces.piece_bytes):
            _convert(part, self._pieces.piece(part.source.file, part.offset, part.source_bytes))


def _convert(piece: Piece, found: memoryview) -> None:
    """Give the target the values that were found."""
    if piece.target.numel():
        values = torch.frombuffer(found, dtype=piece.source.dtype)
        piece.target.copy_(values.view(piece.target.shape))


class _GpuCopier:
    """Two pinned buffers and a stream: one buffer is filled while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the memory is from there
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        self._copied = [torch.cuda.Event() for _ in "ab"]  # type: ignore[no-untyped-call]
        self._turn = 0

    @contextmanager
    def copying_to(self, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give a pinned tensor to fill; copies it to ``target`` afterwards, without waiting."""
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].synchronize()
        pinned = self._buffers[turn][: target.nbytes].view(target.dtype).view(target.shape)
        yield pinned
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            self._copied[turn].record(self._stream)

    def finish(self) -> None:
        """Wait for the copies under way."""
        self._stream.synchronize()


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
