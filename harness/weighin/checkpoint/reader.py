"""Read a tensor's elements from a checkpoint in pieces, in bounded memory."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from math import prod
from typing import Final

import torch

from weighin.checkpoint.checksum import PIECE_ELEMENTS, RunningChecksum, cut, pieces_of
from weighin.stream.bytes import PIECE_BYTES, Reader, mapped
from weighin.stream.filling import blocks
from weighin.stream.slices import Fill, Slice, TensorPlan, ties

RECORD_BYTES: Final = 4096  # an upper bound of a tensor's header and name in a file
# Of the tensors that are in memory as a whole, there is one at a time.
_WHOLE: Final = threading.Lock()


def read_pieces(where: Slice) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order, in flat pieces. The next piece may overwrite the last one."""
    if where.nbytes == 0:
        return
    if where.parts or where.fill:  # in several blocks, or computed
        with _WHOLE:
            values = torch.empty(where.shape, dtype=where.dtype)
            if where.fill:
                where.fill(values)
            else:
                for part, block in blocks(Fill(where, values)):
                    block.copy_(mapped(part))
            yield from pieces_of(values)
    elif where.encoding:
        from weighin.stream.gguf_files import decoded  # imports numpy

        yield from cut(decoded(where, PIECE_ELEMENTS))
    elif where.contiguous:
        piece_bytes = PIECE_ELEMENTS * where.dtype.itemsize
        buffer = torch.empty(min(piece_bytes, where.nbytes), dtype=torch.uint8)
        with closing(Reader()) as reader:
            for start in range(0, where.nbytes, piece_bytes):
                piece = buffer[: where.nbytes - start]
                target, offset = memoryview(piece.numpy().data), where.offset + start
                for at in range(0, len(target), PIECE_BYTES):
                    reader.read(where.file, target[at : at + PIECE_BYTES], offset + at)
                yield piece.view(where.dtype)
    else:  # for example transposed
        yield from pieces_of(mapped(where))


def bytes_to_read(slices: Iterable[Slice]) -> int:
    """Return the size of tensors in their files; a tied tensor counts once."""
    stored = {one.place: one.storage_bytes if one.encoding else one.nbytes for one in slices}
    return sum(stored.values())


def checksum_of(where: Slice, dtype: torch.dtype | None = None) -> str:
    """Return the checksum of a tensor, or of its values in ``dtype``."""
    kind = dtype or where.dtype
    running = RunningChecksum(prod(where.shape) * kind.itemsize)
    for piece in read_pieces(where):
        running.update(piece.to(kind))
    return running.hexdigest()


def widest_dtype(slices: Sequence[Slice]) -> torch.dtype:
    """Return the widest floating-point dtype in a checkpoint; float32 if there is none."""
    kinds = [where.dtype for where in slices if where.dtype.is_floating_point]
    return max(kinds, key=lambda kind: kind.itemsize, default=torch.float32)


def plans(slices: Sequence[Slice]) -> list[TensorPlan]:
    tied = ties(slices)
    return [TensorPlan(one.name, one.shape, one.dtype, tied.get(one.name)) for one in slices]
