"""Describe a tensor whose elements lie, in row-major order, in several flat tensors of some files.

An optimizer of DeepSpeed that divides a model among processes (ranks) stores the share of each rank
as one flat tensor. A share may begin and end within a row of a weight, and is then not one
rectangular block. ``boxes`` divides such a share into a few blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.formats.base import Part, TensorSlice, row_major
from weighin.formats.dtypes import ITEM_BYTES
from weighin.formats.unknown_file import shown

Shape = tuple[int, ...]

COPY: Final = "copy the whole folder again, from every machine that took part in the training"


class Flat:
    """Presents several flat tensors, one after the other, as one flat tensor."""

    def __init__(self, path: Path, tensors: Sequence[TensorSlice]) -> None:
        """Check that all tensors are flat and have one dtype; errors name a file, or ``path``.

        Raises:
            CheckpointError: there are no tensors, or one is not flat, has gaps or another dtype.
        """
        for one in tensors:
            if len(one.shape) != 1 or not one.contiguous or one.dtype_name != tensors[0].dtype_name:
                what = f"{shown(one.name)} is no flat tensor of {tensors[0].dtype_name}"
                raise incomplete(one.file, what)
        if not tensors:
            raise incomplete(path, "a partition holds no tensors")
        self._path, self._tensors = path, tensors
        self.numel = sum(one.shape[0] for one in tensors)

    def ranges(self, first: int, count: int) -> list[TensorSlice]:
        """Return where ``count`` elements are in the files; the first of them has the index
        ``first``.

        Raises:
            CheckpointError: the flat tensors have fewer elements.
        """
        if first + count > self.numel:
            raise incomplete(
                self._path,
                f"elements {first:,} to {first + count:,} of a partition are needed, "
                f"but it has {self.numel:,}",
            )
        ranges, at = [], 0
        for one in self._tensors:
            begin, end = max(first, at), min(first + count, at + one.shape[0])
            if begin < end:
                ranges.append(_range(one, begin - at, end - begin))
            at += one.shape[0]
        return ranges or [_range(self._tensors[0], 0, 0)]


def incomplete(path: Path, what: str) -> CheckpointError:
    """Return the error for an incomplete file or folder of DeepSpeed; ``what`` names the fault."""
    return CheckpointError(f"{path}: {what}", COPY)


def joined(name: str, shape: Shape, ranges: Sequence[TensorSlice]) -> TensorSlice:
    """Return the tensor of the given shape that has the elements of ``ranges``, in order."""
    parts: list[Part] = []
    at = 0
    for where in ranges:
        place = where.offset
        for start, size in boxes(shape, at, at + where.shape[0]):
            block = _block(where, name, size, place)
            parts.append(Part(start, block))
            place += block.nbytes
        at += where.shape[0]
    if len(parts) > 1:
        return replace(parts[0].where, shape=shape, stride=row_major(shape), parts=tuple(parts))
    first = parts[0].where if parts else ranges[0]
    return _block(first, name, shape, first.offset)


def boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield blocks, as (start, shape), that cover a tensor's elements ``first`` to ``last - 1``.

    The blocks are in row-major order, and each is contiguous. The first blocks cover an incomplete first
    row, one block the whole rows, and the last blocks an incomplete last row.
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    (begin, head), (end, tail) = divmod(first, row), divmod(last, row)
    if head:
        for start, size in boxes(shape[1:], head, row if begin < end else tail):
            yield (begin, *start), (1, *size)
        begin += 1
    if begin < end:
        yield (begin, *[0] * len(shape[1:])), (end - begin, *shape[1:])
    if tail and begin <= end:
        for start, size in boxes(shape[1:], 0, tail):
            yield (end, *start), (1, *size)


def _range(flat: TensorSlice, first: int, count: int) -> TensorSlice:
    return _block(flat, flat.name, (count,), flat.offset + first * ITEM_BYTES[flat.dtype_name])


def _block(where: TensorSlice, name: str, shape: Shape, offset: int) -> TensorSlice:
    """Return a contiguous block whose storage is the block alone, not the flat tensor around it."""
    size = prod(shape) * ITEM_BYTES[where.dtype_name]
    return TensorSlice(
        name, shape, row_major(shape), where.dtype_name, where.file, offset, offset, size
    )
