"""Allocate memory for a checkpoint's tensors, and divide it into reads (pieces).

Tensors that adjoin in a file get one area of memory. There, one large read fills several small tensors,
which is faster than a read for each tensor, and tensors can share huge pages. Each tensor has its own
storage. When a tensor is freed, the pages that hold only this tensor are freed. Each tensor begins at a
multiple of 64 bytes, as in torch's own allocations, because the memory address affects how some
operations round.
"""

import ctypes
import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from weighin.loader.direct_io import PIECE_BYTES
from weighin.loader.open_file import ALIGNMENT, ask_for_huge_pages
from weighin.stream.slices import TensorSlice

HUGE_PAGE_BYTES: Final = 2 * 1024**2

TENSOR_ALIGNMENT: Final = 64
"""The alignment of torch's own allocations in bytes. The alignment affects how some operations round."""

MAP_NORESERVE: Final = 0x4000
"""A flag of linux/mman.h: the kernel does not count the mapping's size as committed memory."""

MOST_BETWEEN_BYTES: Final = 64 * 1024
"""The largest gap in the file between two pieces of one read, in bytes."""

_CPU: Final = torch.device("cpu")


class Area:
    """Newly allocated memory in huge pages for tensors that are adjacent in a file.

    Each tensor has its own storage, so that ``torch.save`` of one tensor writes no other tensor. Pages
    of several tensors are freed with the last tensor of the area.

    Args:
        size: the size of the range of the file, in bytes.
        offset: the range's offset in the file. Each tensor gets the same offset within a page in memory
            as in the file, rounded down to ``TENSOR_ALIGNMENT``, so that direct reads need no buffer.
    """

    def __init__(self, size: int, offset: int) -> None:
        self._size = size
        self._memory, self._first = _huge(size, _lead(offset))

    @property
    def whole(self) -> torch.Tensor:
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self._size, offset=self._first
        )

    def tensor(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor that begins ``at`` bytes after the start of the area."""
        first = self._first + at
        last = first + numel * dtype.itemsize
        view = memoryview(self._memory)[first:last]
        low = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        high = last // mmap.PAGESIZE * mmap.PAGESIZE
        if low < high:
            give_back = weakref.finalize(
                view, self._memory.madvise, mmap.MADV_DONTNEED, low, high - low
            )
            give_back.atexit = False
        return torch.frombuffer(view, dtype=dtype)


def allocate(numel: int, dtype: torch.dtype, device: torch.device, offset: int = 0) -> torch.Tensor:
    """Return a flat uninitialised tensor; a tensor of 2 MiB or more on the CPU gets huge pages.

    Without huge pages, faults of 4 KiB pages would take most of the time of a load from the page cache.

    Args:
        offset: the tensor's offset in its file, as for an ``Area``.
    """
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    memory, first = _huge(size, _lead(offset))
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=first)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _lead(offset: int) -> int:
    """Return ``offset`` modulo 4096, rounded down to a multiple of ``TENSOR_ALIGNMENT``."""
    within = offset % ALIGNMENT
    return within - within % TENSOR_ALIGNMENT


def _huge(size: int, lead: int) -> tuple[mmap.mmap, int]:
    """Map ``size`` bytes that begin ``lead`` bytes after the start of a huge page.

    Return the mapping, and the offset of these bytes in the mapping.
    """
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    area = mmap.mmap(-1, size + HUGE_PAGE_BYTES + lead, flags=flags)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE_BYTES
    # Only whole huge pages, because the kernel charges a partly used huge page in full.
    ask_for_huge_pages(area, skip, (size + lead) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return area, skip + lead


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
        for part in sorted(self.source.parts, key=lambda part: part.read_order):
            place = tuple(
                slice(at, at + size) for at, size in zip(part.start, part.shape, strict=True)
            )
            yield part, self.memory[place]


def is_readable(source: TensorSlice) -> bool:
    """Tell whether a tensor, or each of its blocks, is stored without gaps, in any dimension order."""
    if not source.parts:
        return source.contiguous or file_order(source) is not None
    return all(file_order(part) is not None for part in source.parts)


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


class MemoryNeed(NamedTuple):
    """A tensor of the model that needs new memory, and its source in the checkpoint.

    ``tensor`` already has its final shape and strides, without gaps. ``dtype`` and ``device`` are
    the dtype and device of the new memory.
    """

    source: TensorSlice
    tensor: torch.Tensor
    dtype: torch.dtype
    device: torch.device

    def give(self, flat: torch.Tensor) -> Fill:
        """Make ``flat`` the tensor's memory, and return the ``Fill`` that reads the values into it."""
        self.tensor.data = flat.as_strided(self.tensor.shape, self.tensor.stride(), 0)
        return Fill(self.source, self.tensor.detach())

    @property
    def stays(self) -> bool:
        """Whether the file's bytes can be read into the tensor's memory without a conversion."""
        source, tensor = self.source, self.tensor
        return (
            self.device == _CPU
            and self.dtype == source.dtype
            and not source.parts
            and not source.encoding
            and source.nbytes > 0
            and not source.offset % source.dtype.itemsize
            and ((source.contiguous and tensor.is_contiguous()) or self._has_same_order())
        )

    def _has_same_order(self) -> bool:
        sizes = zip(self.source.shape, self.tensor.stride(), self.source.stride, strict=True)
        return file_order(self.source) is not None and all(
            size == 1 or ours == theirs for size, ours, theirs in sizes
        )

    def follows(self, before: "MemoryNeed", first: "MemoryNeed") -> bool:
        """Tell whether a tensor can follow ``before`` in the area that begins with ``first``."""
        source = self.source
        return (
            source.file == before.source.file
            and 0 <= source.offset - _end(before.source) <= MOST_BETWEEN_BYTES
            and not (source.offset - first.source.offset) % TENSOR_ALIGNMENT
        )


def provide(needs: Sequence[MemoryNeed]) -> Iterator[Fill]:
    """Allocate memory for all tensors, and yield each part of it with the source of its values.

    Args:
        needs: the tensors, sorted by file and offset.
    """
    run: list[MemoryNeed] = []
    for need in needs:
        stays = need.stays
        if run and not (stays and need.follows(run[-1], run[0])):
            yield from _together(run)
            run = []
        if stays:
            run.append(need)
        else:
            yield need.give(_own_memory(need, 0))
    yield from _together(run)


def _own_memory(need: MemoryNeed, offset: int) -> torch.Tensor:
    return allocate(need.tensor.numel(), need.dtype, need.device, offset)


def _together(run: Sequence[MemoryNeed]) -> Iterator[Fill]:
    """Yield one area for all tensors if they have at least 2 MiB together, else memory for each one."""
    if not run:
        return
    start = run[0].source.offset
    size = _end(run[-1].source) - start
    if len(run) == 1 or size < HUGE_PAGE_BYTES:
        yield from (need.give(_own_memory(need, need.source.offset)) for need in run)
        return
    area = Area(size, start)
    members = []
    for need in run:
        flat = area.tensor(need.source.offset - start, need.tensor.numel(), need.dtype)
        members.append(need.give(flat).memory)
    source = TensorSlice("", (size,), (1,), "uint8", run[0].source.file, start, start, size)
    yield Fill(source, area.whole, tuple(members))


def _end(source: TensorSlice) -> int:
    return source.offset + source.nbytes
