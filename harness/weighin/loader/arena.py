"""Memory for what a checkpoint holds; what lies side by side in a file lies so in memory, too.

One read fills neighbours then, across the borders between tensors: as much at once as the disk, or
a copy of what is cached, is fastest with. They share huge pages, where each alone would end in small
ones. Each still is a storage of its own, whose memory is given back with it, and begins where torch
would let it begin: at a multiple of 64 bytes, which decides how some operations round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.fill import Fill, file_order
from weighin.loader.huge_pages import HUGE_PAGE_BYTES, TENSOR_ALIGNMENT, Area, allocate
from weighin.loader.reads import MOST_BETWEEN_BYTES, Fillable, Piece, cut

_CPU: Final = torch.device("cpu")


class MemoryNeed(NamedTuple):
    """Memory that is wanted for a tensor of a checkpoint.

    ``tensor`` tells shape and strides, and gets the memory as its data; without gaps.
    """

    source: TensorSlice
    tensor: torch.Tensor
    dtype: torch.dtype
    device: torch.device

    def give(self, flat: torch.Tensor) -> Fill:
        """Let the tensor lie in flat memory, and return what is to be filled."""
        self.tensor.data = flat.as_strided(self.tensor.shape, self.tensor.stride(), 0)
        return Fill(self.source, self.tensor.detach())

    @property
    def stays(self) -> bool:
        """Whether it is in CPU memory what it is in the file, byte for byte, from end to end."""
        source, tensor = self.source, self.tensor
        return (
            self.device == _CPU
            and self.dtype == source.dtype
            and not source.parts
            and source.nbytes > 0
            and not source.offset % source.dtype.itemsize
            and file_order(source) is not None
            and all(
                size == 1 or ours == theirs
                for size, ours, theirs in zip(
                    source.shape, tensor.stride(), source.stride, strict=True
                )
            )
        )

    def follows(self, before: "MemoryNeed", first: "MemoryNeed") -> bool:
        """Tell whether it can lie behind another one in memory that begins with ``first``."""
        source = self.source
        return (
            source.file == before.source.file
            and 0 <= source.offset - _end(before.source) <= MOST_BETWEEN_BYTES
            and not (source.offset - first.source.offset) % TENSOR_ALIGNMENT
        )


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Tensors of one file, in its order, and the memory that holds them all as the file does."""

    members: tuple[torch.Tensor, ...]
    source: TensorSlice
    memory: torch.Tensor

    @property
    def converts(self) -> bool:
        return False

    @property
    def source_bytes(self) -> int:
        return self.source.nbytes

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the reads to make, none into more memory than that."""
        yield from cut(self.source, self.source.offset, self.memory, most_bytes)


def provide(needs: Sequence[MemoryNeed]) -> Iterator[Fillable]:
    """Give fresh memory to all tensors, and yield what is to be filled.

    Args:
        needs: in the order of the files' bytes.
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
            yield need.give(_alone(need, 0))
    yield from _together(run)


def _alone(need: MemoryNeed, offset: int) -> torch.Tensor:
    """Return memory for one tensor, which lies in its pages as if it began at ``offset``."""
    return allocate(need.tensor.numel(), need.dtype, need.device, offset)


def _together(run: Sequence[MemoryNeed]) -> Iterator[Fillable]:
    """Yield memory for tensors of one file that follow each other and stay as they are."""
    if not run:
        return
    start = run[0].source.offset
    size = _end(run[-1].source) - start
    if len(run) == 1 or size < HUGE_PAGE_BYTES:
        yield from (need.give(_alone(need, need.source.offset)) for need in run)
        return
    area = Area(size, start)
    members = []
    for need in run:
        flat = area.tensor(need.source.offset - start, need.tensor.numel(), need.dtype)
        members.append(need.give(flat).memory)
    source = TensorSlice("", (size,), (1,), "uint8", run[0].source.file, start, start, size)
    yield Neighbours(tuple(members), source, area.whole)


def _end(source: TensorSlice) -> int:
    return source.offset + source.nbytes
