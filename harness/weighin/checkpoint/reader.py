"""Read a tensor's elements from a checkpoint in pieces, in bounded memory."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from typing import Final

import torch

from weighin.checkpoint.checksum import PIECE_ELEMENTS, RunningChecksum, cut, pieces_of
from weighin.stream.bytes import PIECE_BYTES, Reader, mapped
from weighin.stream.slices import Progress, Slice, TensorPlan, ties

RECORD_BYTES: Final = 4096  # an upper bound of a tensor's header and name in a file
_COMPUTING: Final = threading.Lock()  # a computed tensor is in memory as a whole, so one at a time


def read_pieces(where: Slice) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order, in flat pieces; the next may overwrite the last."""
    if where.nbytes == 0:
        return
    if where.fill:
        with _COMPUTING:
            values = torch.empty(where.shape, dtype=where.dtype)
            where.fill(values)
            yield from pieces_of(values)
    elif where.encoding:
        from weighin.stream.gguf_files import decoded  # imports numpy

        yield from cut(decoded(where, PIECE_ELEMENTS))
    elif where.parts:
        yield from cut(_rows(where))
    elif where.contiguous:
        yield from _contiguous(where)
    else:  # for example transposed
        yield from pieces_of(mapped(where))


def checksum_of(
    where: Slice, progress: Progress | None = None, dtype: torch.dtype | None = None
) -> str:
    """Return the checksum of a tensor, or of its values in ``dtype``; tell ``progress`` the bytes read."""
    kind = dtype or where.dtype
    running = RunningChecksum(prod(where.shape) * kind.itemsize)
    for piece in read_pieces(where):
        running.update(piece.to(kind))
        if progress is not None:
            progress(piece.nbytes)
    return running.hexdigest()


def widest_dtype(slices: Sequence[Slice]) -> torch.dtype:
    """Return the widest floating-point dtype in a checkpoint; float32 if there is none."""
    kinds = [where.dtype for where in slices if where.dtype.is_floating_point]
    return max(kinds, key=lambda kind: kind.itemsize, default=torch.float32)


def _contiguous(where: Slice) -> Iterator[torch.Tensor]:
    piece_bytes = PIECE_ELEMENTS * where.dtype.itemsize
    buffer = torch.empty(min(piece_bytes, where.nbytes), dtype=torch.uint8)
    with closing(Reader()) as reader:
        for start in range(0, where.nbytes, piece_bytes):
            piece = buffer[: where.nbytes - start]
            memory = memoryview(piece.numpy().data)
            for at in range(0, len(memory), PIECE_BYTES):
                reader.read(where.file, memory[at : at + PIECE_BYTES], where.offset + start + at)
            yield piece.view(where.dtype)


def _rows(where: Slice) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements from its ``parts``; copy ``PIECE_ELEMENTS`` or a row at a time."""
    rows = max(1, PIECE_ELEMENTS // max(1, prod(where.shape[1:])))
    for first in range(0, where.shape[0], rows):
        last = min(first + rows, where.shape[0])
        block = torch.empty((last - first, *where.shape[1:]), dtype=where.dtype)
        for part in where.parts:
            begin, end = part.start[0], part.start[0] + part.shape[0]
            low, high = max(first, begin), min(last, end)
            if low >= high or not part.nbytes:
                continue
            place = [slice(low - first, high - first)]
            place += [
                slice(at, at + size)
                for at, size in zip(part.start[1:], part.shape[1:], strict=True)
            ]
            block[tuple(place)] = mapped(part)[low - begin : high - begin]
        yield block.reshape(-1)


def plans(slices: Sequence[Slice], dtype: torch.dtype | None = None) -> list[TensorPlan]:
    """Return each tensor's plan, in ``dtype`` if it is floating-point; None keeps its own."""
    tied, tensors = ties(slices), []
    for source in slices:
        kind = dtype if dtype is not None and source.dtype.is_floating_point else source.dtype
        tensors.append(TensorPlan(source.name, source.shape, kind, tied.get(source.name)))
    return tensors
