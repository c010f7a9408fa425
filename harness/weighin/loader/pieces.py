"""Divide the tensors to fill into reads (pieces): ranges of a file, each with the memory it fills."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.direct_io import PIECE_BYTES
from weighin.loader.huge_pages import HUGE_PAGE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One read: the file's bytes from ``offset`` on fill ``target``, in row-major order."""

    source: TensorSlice
    offset: int
    target: torch.Tensor

    @property
    def source_bytes(self) -> int:
        return self.target.numel() * self.source.dtype.itemsize

    @property
    def end(self) -> int:
        """The offset in the file at which the piece ends."""
        return self.offset + self.source_bytes

    @property
    def plain(self) -> bool:
        """Whether the file's bytes can be read into the target as they are."""
        target = self.target
        return (
            target.dtype == self.source.dtype
            and target.is_contiguous()
            and not target.is_cuda
            and target.numel() > 0
        )

    @property
    def buffered(self) -> bool:
        """Whether one read into the thread's buffer can cover the piece and adjacent pieces."""
        return (
            not self.plain
            and not self.target.is_cuda
            and self.target.numel() > 0
            and self.offset % self.source.dtype.itemsize == 0
        )

    def parts(self, most_bytes: int) -> Iterator["Piece"]:
        """Yield the read, divided into parts of at most ``most_bytes`` of the file."""
        if self.source_bytes <= most_bytes:
            yield self
            return
        size = self.source.dtype.itemsize
        count = most_bytes // size
        for number, part in enumerate(torch.split(self.target.view(-1), count)):
            yield Piece(self.source, self.offset + number * count * size, part)


def cut(source: TensorSlice, offset: int, target: torch.Tensor, most_bytes: int) -> Iterator[Piece]:
    """Yield the reads that fill a contiguous ``target`` with the file's bytes from ``offset`` on.

    Each read but the last one ends at the end of a huge page of the target (with ``most_bytes`` of at
    least 2 MiB), because two threads that touch the same huge page would both clear it. Reads for a
    GPU are no larger than a pinned buffer.
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


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A tensor to fill, and its source in a checkpoint.

    Attributes:
        source: the tensor in the checkpoint, or the range of a file with several adjacent tensors.
        memory: the tensor to fill, of the same shape; for several tensors, the memory that they
            share, as bytes.
        neighbours: the tensors in the shared memory; empty if ``memory`` is one tensor of the model.
    """

    source: TensorSlice
    memory: torch.Tensor
    neighbours: tuple[torch.Tensor, ...] = ()

    @property
    def members(self) -> Sequence[torch.Tensor]:
        """The tensors of the model that lie in the memory to fill."""
        return self.neighbours or (self.memory,)

    @property
    def converts(self) -> bool:
        """Whether the elements have another dtype in the file than in memory."""
        return self.memory.dtype != self.source.dtype

    @property
    def scattered(self) -> bool:
        """Whether the tensor is stored in several blocks, at different places in the files."""
        return bool(self.source.parts)

    @property
    def source_bytes(self) -> int:
        return self.source.nbytes

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the reads, one stored block after the other; each fills at most ``most_bytes``."""
        if not self.memory.numel():
            return
        for where, target in self._blocks():
            order = file_order(where)
            assert order is not None
            yield from _cut(where, where.offset, target.permute(order), most_bytes)

    def _blocks(self) -> Iterator[tuple[TensorSlice, torch.Tensor]]:
        """Yield each stored block of the tensor, and the part of ``memory`` that receives the block."""
        if not self.source.parts:
            yield self.source, self.memory
        for part in sorted(self.source.parts, key=lambda part: part.where.read_order):
            place = tuple(
                slice(at, at + size) for at, size in zip(part.start, part.where.shape, strict=True)
            )
            yield part.where, self.memory[place]


def is_readable(source: TensorSlice) -> bool:
    """Tell whether a tensor, or each of its blocks, is stored without gaps, in any dimension order."""
    if not source.parts:
        return source.contiguous or file_order(source) is not None
    return all(file_order(part.where) is not None for part in source.parts)


def file_order(where: TensorSlice) -> list[int] | None:
    """Return the dimensions in the order in which the file stores them, the outermost first.

    ``file_order`` returns None if there are gaps between the elements, or the elements overlap.
    """
    if where.contiguous:
        return list(range(len(where.shape)))
    order = sorted(range(len(where.shape)), key=lambda n: (-where.stride[n], n))
    shape, stride = (tuple(values[n] for n in order) for values in (where.shape, where.stride))
    return order if replace(where, shape=shape, stride=stride).contiguous else None


def _cut(
    source: TensorSlice, offset: int, target: torch.Tensor, most_bytes: int
) -> Iterator[Piece]:
    """Yield the reads that fill ``target``, strided or contiguous, with the bytes from ``offset`` on."""
    if target.is_contiguous():
        yield from cut(source, offset, target, most_bytes)
        return
    row_bytes = target[0].numel() * source.dtype.itemsize
    rows = min(PIECE_BYTES, most_bytes) // max(row_bytes, target[0].nbytes)
    for first in range(0, len(target), rows or 1):
        at = offset + first * row_bytes
        if rows:
            yield Piece(source, at, target[first : first + rows])
        else:
            yield from _cut(source, at, target[first], most_bytes)
