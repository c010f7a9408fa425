"""A tensor's elements from their place in a file, piece after piece: never held or mapped whole."""

import mmap
import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import torch

from weighin.checkpoint.piecewise import PIECE_ELEMENTS
from weighin.errors import CheckpointError
from weighin.formats.base import TensorPlan, TensorSlice
from weighin.loader.direct_io import PIECE_BYTES, PieceReader

_ROWS_BYTES: Final = PIECE_ELEMENTS  # of a strided tensor, this much is copied at a time


def read_pieces(where: TensorSlice) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order, as flat tensors of at most ``PIECE_ELEMENTS``.

    All but the last have that length. Pieces share memory: use each before the next.

    Raises:
        CheckpointError: the file ends before the tensor does, or its disk fails.
    """
    if where.nbytes == 0:
        return
    if where.parts:
        yield from _joined(where)
    elif where.contiguous:
        yield from _contiguous(where)
    else:
        yield from _gathered(where)


def _contiguous(where: TensorSlice) -> Iterator[torch.Tensor]:
    piece_bytes = PIECE_ELEMENTS * where.dtype.itemsize
    buffer = torch.empty(min(piece_bytes, where.nbytes), dtype=torch.uint8)
    reader = PieceReader()
    try:
        for start in range(0, where.nbytes, piece_bytes):
            piece = buffer[: where.nbytes - start]
            memory = memoryview(piece.numpy().data)
            for at in range(0, len(memory), PIECE_BYTES):
                reader.read(where.file, memory[at : at + PIECE_BYTES], where.offset + start + at)
            yield piece.view(where.dtype)
    finally:
        reader.close()


def _gathered(where: TensorSlice) -> Iterator[torch.Tensor]:
    """A transposed or otherwise strided tensor: its stretch of the file is mapped, and copied."""
    tensor = _mapped(where)
    rows = max(1, _ROWS_BYTES // max(1, tensor[0].numel()))
    yield from _cut(
        tensor[first : first + rows].reshape(-1).contiguous()
        for first in range(0, len(tensor), rows)
    )


def _joined(where: TensorSlice) -> Iterator[torch.Tensor]:
    """A tensor in several parts: some of its rows at a time are put together from mapped files."""
    yield from _cut(_rows(where))


def _rows(where: TensorSlice) -> Iterator[torch.Tensor]:
    row_elements = prod(where.shape[1:])
    rows = max(1, _ROWS_BYTES // max(1, row_elements))
    for first in range(0, where.shape[0], rows):
        last = min(first + rows, where.shape[0])
        block = torch.empty((last - first, *where.shape[1:]), dtype=where.dtype)
        for part in where.parts:
            begin, end = part.start[0], part.start[0] + part.where.shape[0]
            low, high = max(first, begin), min(last, end)
            if low >= high or not part.where.nbytes:
                continue
            place = [slice(low - first, high - first)]
            place += [
                slice(at, at + size)
                for at, size in zip(part.start[1:], part.where.shape[1:], strict=True)
            ]
            block[tuple(place)] = _mapped(part.where)[low - begin : high - begin]
        yield block.reshape(-1)


def _cut(stretches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the elements of all stretches in pieces of ``PIECE_ELEMENTS``, the last one shorter."""
    rest: torch.Tensor | None = None
    for stretch in stretches:
        rest = stretch if rest is None else torch.cat([rest, stretch])
        while len(rest) >= PIECE_ELEMENTS:
            yield rest[:PIECE_ELEMENTS]
            rest = rest[PIECE_ELEMENTS:]
    if rest is not None and len(rest):
        yield rest


def _mapped(where: TensorSlice) -> torch.Tensor:
    """Return a tensor over its mapped stretch of the file, and no more of it."""
    reach = sum((size - 1) * step for size, step in zip(where.shape, where.stride, strict=True))
    start = where.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = where.offset - start + (reach + 1) * where.dtype.itemsize
    with where.file.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start + length:
            raise CheckpointError(
                f"{where.file}: truncated: it ends before byte {start + length:,}",
                "copy or download the file again",
            )
        # Copy on write only makes torch take it: nothing is written.
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
    flat = torch.frombuffer(mapped, dtype=where.dtype, offset=where.offset - start, count=reach + 1)
    return flat.as_strided(where.shape, where.stride)


def plans(slices: Sequence[TensorSlice], dtype: torch.dtype | None = None) -> list[TensorPlan]:
    """Return what to write of a checkpoint's tensors; equal places in a file are tied.

    ``dtype`` is what floating-point tensors become. Views of one storage that are not the same
    tensor are no longer views once written.
    """
    firsts: dict[object, str] = {}
    found = []
    for one in slices:
        parts = tuple((part.start, part.where.file, part.where.offset) for part in one.parts)
        place = one.file, one.offset, one.dtype, one.shape, one.stride, parts
        first = firsts.setdefault(place, one.name)
        tied = first != one.name and one.nbytes > 0
        kind = dtype if dtype is not None and one.dtype.is_floating_point else one.dtype
        found.append(TensorPlan(one.name, one.shape, kind, first if tied else None))
    return found
