"""Allocate memory for a checkpoint's tensors; tensors that adjoin in a file get one area of memory.

In a shared area, one large read fills several small tensors, which is faster than a read for each
tensor, and tensors can share huge pages. Each tensor has its own storage. When a tensor is freed,
the pages that hold only this tensor are freed. Each tensor begins at a multiple of 64 bytes, as in
torch's own allocations, because the memory address affects how some operations round.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.huge_pages import HUGE_PAGE_BYTES, TENSOR_ALIGNMENT, Area, allocate
from weighin.loader.pieces import Fill, file_order
from weighin.loader.reads import MOST_BETWEEN_BYTES

_CPU: Final = torch.device("cpu")


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
