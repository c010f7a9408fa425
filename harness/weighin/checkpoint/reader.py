"""Read a tensor's elements from a checkpoint in pieces, in bounded memory."""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import torch

from weighin.checkpoint.checksum import PIECE_ELEMENTS, RunningChecksum, pieces_of
from weighin.errors import CheckpointError
from weighin.loader.direct_io import PIECE_BYTES, PieceReader
from weighin.stream.foreign import AGAIN
from weighin.stream.slices import Progress, TensorPlan, TensorSlice, ties

_ROWS_ELEMENTS: Final = PIECE_ELEMENTS  # of a strided tensor or a tensor in parts, copied at a time
_COMPUTING: Final = threading.Lock()  # a computed tensor is in memory as a whole, so one at a time


def read_pieces(where: TensorSlice) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order, in pieces (flat tensors) of ``PIECE_ELEMENTS``.

    Only the last piece may be shorter. The next piece may overwrite the previous one, so finish
    with each piece before you take the next.

    Raises:
        CheckpointError: the file is too short, or its disk fails.
    """
    if where.nbytes == 0:
        return
    if where.fill:
        with _COMPUTING:
            values = torch.empty(where.shape, dtype=where.dtype)
            where.fill(values)
            yield from pieces_of(values)
    elif where.encoding:
        from weighin.stream.gguf_files import decoded  # imports numpy

        yield from _cut(decoded(where, PIECE_ELEMENTS))
    elif where.parts:
        yield from _cut(_rows(where))
    elif where.contiguous:
        yield from _contiguous(where)
    else:
        yield from _gathered(where)


def read_into(where: TensorSlice, target: torch.Tensor) -> torch.Tensor:
    """Read a tensor into ``target``, which must be contiguous, and return ``target``.

    Raises:
        CheckpointError: the file is too short, or its disk fails.
    """
    at = 0
    for piece in read_pieces(where):
        target.view(-1)[at : at + len(piece)] = piece
        at += len(piece)
    return target


def checksum_of(where: TensorSlice, progress: Progress | None = None) -> str:
    """Return a tensor's checksum; call ``progress`` with the size in bytes of each piece read."""
    running = RunningChecksum(where.nbytes)
    for piece in read_pieces(where):
        running.update(piece)
        if progress is not None:
            progress(piece.nbytes)
    return running.hexdigest()


def widest_dtype(slices: Sequence[TensorSlice]) -> torch.dtype:
    """Return the widest floating-point dtype in a checkpoint; float32 if there is none."""
    kinds = [where.dtype for where in slices if where.dtype.is_floating_point]
    return max(kinds, key=lambda kind: kind.itemsize, default=torch.float32)


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
    """Yield a strided (for example transposed) tensor's elements, copied from a mapped file."""
    tensor = _mapped(where)
    rows = max(1, _ROWS_ELEMENTS // max(1, tensor[0].numel()))
    yield from _cut(
        tensor[first : first + rows].reshape(-1).contiguous()
        for first in range(0, len(tensor), rows)
    )


def _rows(where: TensorSlice) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements from its ``parts``; copy ``_ROWS_ELEMENTS`` or a row at a time."""
    row_elements = prod(where.shape[1:])
    rows = max(1, _ROWS_ELEMENTS // max(1, row_elements))
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
            block[tuple(place)] = _mapped(part)[low - begin : high - begin]
        yield block.reshape(-1)


def _cut(stretches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield all elements in pieces of ``PIECE_ELEMENTS``; the last piece may be shorter."""
    rest: torch.Tensor | None = None
    for stretch in stretches:
        rest = stretch if rest is None else torch.cat([rest, stretch])
        while len(rest) >= PIECE_ELEMENTS:
            yield rest[:PIECE_ELEMENTS]
            rest = rest[PIECE_ELEMENTS:]
    if rest is not None and len(rest):
        yield rest


def _mapped(where: TensorSlice) -> torch.Tensor:
    """Map a tensor's range of the file into memory, and return the tensor in this mapping."""
    start = where.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = where.offset - start + where.span * where.dtype.itemsize
    with where.file.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start + length:
            raise CheckpointError(
                f"{where.file}: truncated: the file ends before byte {start + length:,}",
                AGAIN,
            )
        # Copy-on-write, because torch needs a writable buffer; nothing is ever written to it.
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
    flat = torch.frombuffer(
        mapped, dtype=where.dtype, offset=where.offset - start, count=where.span
    )
    return flat.as_strided(where.shape, where.stride)


def plans(slices: Sequence[TensorSlice], dtype: torch.dtype | None = None) -> list[TensorPlan]:
    """Return the ``TensorPlan`` of each tensor; tensors with the same elements in a file are tied.

    ``dtype`` is the new dtype of floating-point tensors; None keeps their own dtypes. Two views of
    one storage become separate tensors if they have different elements.
    """
    tied, tensors = ties(slices), []
    for source in slices:
        kind = dtype if dtype is not None and source.dtype.is_floating_point else source.dtype
        tensors.append(TensorPlan(source.name, source.shape, kind, tied.get(source.name)))
    return tensors
