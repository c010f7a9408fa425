"""Filling one tensor's memory from the blocks that several ranks saved, each in a place of its own.

A block of whole rows is one stretch of the memory, and is read straight into it. Any other block
has a stretch for each of its rows: it passes through the buffer that a conversion uses, piece after
piece, so that no more memory is held than for a tensor that is whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from harness.checkpoint.direct import PIECE_BYTES
from harness.checkpoint.filling import final_dtype, is_ready
from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.memory import allocate
from harness.checkpoint.pieces import Piece, cut
from harness.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A tensor that lies in blocks, and its memory: flat, of the final dtype, on the final device.

    ``slices`` are its names: one, or several that are tied.
    """

    slices: tuple[TensorSlice, ...]
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
            yield one.name, self.memory.view(one.shape)

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the reads to make, block after block, none into more memory than that."""
        whole = self.memory.view(self.slices[0].shape)
        for part in self.slices[0].parts:
            place = tuple(
                slice(at, at + size) for at, size in zip(part.start, part.where.shape, strict=True)
            )
            order = _file_order(part.where)
            target = whole[place].permute(order)
            yield from _cut(part.where, part.where.offset, target, most_bytes)


def prepare(
    slices: Sequence[TensorSlice],
    targets: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Blocks:
    """Return the tensor called by all ``slices``, with memory to fill: the target's own, or fresh.

    Raises:
        CheckpointError: the elements of a block do not lie one behind the other, in any order of
            its dimensions; ``torch.distributed.checkpoint`` writes no such.
    """
    first = slices[0]
    for part in first.parts:
        _file_order(part.where)
    kind = final_dtype(first, dtype)
    own = targets.get(first.name)
    if own is not None and is_ready(own, device, kind):
        return Blocks(tuple(slices), own.detach().view(-1))
    return Blocks(tuple(slices), allocate(prod(first.shape), kind, device))


def _file_order(where: TensorSlice) -> list[int]:
    """Return a block's dimensions from the one that is outermost in the file to the innermost."""
    order = sorted(range(len(where.shape)), key=lambda n: where.stride[n], reverse=True)
    shape, stride = (tuple(values[n] for n in order) for values in (where.shape, where.stride))
    if not replace(where, shape=shape, stride=stride).contiguous:
        raise CheckpointError(
            f"{where.file}: the part of {where.name!r} at byte {where.offset:,} has gaps between its "
            "elements",
            f"write its tensors whole: weighin convert {where.file.parent} WHOLE --format dcp",
        )
    return order


def _cut(
    source: TensorSlice, offset: int, target: torch.Tensor, most_bytes: int
) -> Iterator[Piece]:
    """Yield the reads that fill ``target`` from one stretch of the file, which begins at ``offset``."""
    if target.is_contiguous():
        yield from cut(source, offset, target, most_bytes)
        return
    row_bytes = target[0].numel() * source.dtype.itemsize
    rows = PIECE_BYTES // max(row_bytes, target[0].nbytes)
    for first in range(0, len(target), rows or 1):
        at = offset + first * row_bytes
        if rows:
            yield Piece(source, at, target[first : first + rows])
        else:
            yield from _cut(source, at, target[first], most_bytes)
