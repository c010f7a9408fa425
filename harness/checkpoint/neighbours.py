"""Memory for what a checkpoint holds; what lies side by side in a file lies so in memory, too.

One read fills neighbours then, across the borders between tensors: as much at once as the disk, or
a copy of what is cached, is fastest with. They share huge pages, where each alone would end in small
ones. Each still is a storage of its own, whose memory is given back with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from harness.checkpoint import blocks, filling
from harness.checkpoint.filling import Fillable, Stretch, final_dtype, own_memory, span
from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.memory import HUGE_PAGE_BYTES, Area
from harness.checkpoint.pieces import MOST_BETWEEN_BYTES, Piece, cut

Group = Sequence[TensorSlice]
"""Slices that share a storage."""

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Stretches of one file, in its order, and the memory that holds them all as the file does."""

    members: tuple[Stretch, ...]
    source: TensorSlice
    memory: torch.Tensor

    @property
    def converts(self) -> bool:
        return False

    @property
    def source_bytes(self) -> int:
        return self.source.nbytes

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor over the memory."""
        for member in self.members:
            yield from member.views()

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the reads to make, none into more memory than that."""
        yield from cut(self.source, self.source.offset, self.memory, most_bytes)


def prepare(
    groups: Sequence[Group],
    targets: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Iterator[Fillable]:
    """Yield memory for all groups: the targets' own where there is such, a plain tensor of the right
    kind; else fresh.

    Args:
        groups: in the order of the files' bytes.
    """
    run: list[Group] = []
    for group in groups:
        stays = device.type == "cpu" and _stays(group, targets, dtype)
        if run and not (stays and _follows(run[-1], group)):
            yield from _together(run)
            run = []
        if stays:
            run.append(group)
        elif group[0].parts:
            yield blocks.prepare(group, targets, device, dtype)
        else:
            yield filling.prepare(group, targets, device, dtype)
    yield from _together(run)


def _stays(group: Group, targets: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> bool:
    """Tell whether a group's bytes can be read into fresh memory as they are."""
    first = group[0]
    if first.parts or final_dtype(first, dtype) != first.dtype:
        return False
    start, end = span(group)
    aligned = start % first.dtype.itemsize == 0
    return aligned and start < end and own_memory(group, targets, _CPU, first.dtype) is None


def _follows(before: Group, group: Group) -> bool:
    (_, end), (start, _) = span(before), span(group)
    return group[0].file == before[0].file and 0 <= start - end <= MOST_BETWEEN_BYTES


def _together(run: Sequence[Group]) -> Iterator[Fillable]:
    """Yield memory for groups of one file that follow each other and stay as they are."""
    if not run:
        return
    start, end = span(run[0])[0], span(run[-1])[1]
    if len(run) == 1 or end - start < HUGE_PAGE_BYTES:
        yield from (filling.prepare(group, {}, _CPU, None) for group in run)
        return
    area = Area(end - start, start)
    members = []
    for group in run:
        first, (begin, stop) = group[0], span(group)
        numel = (stop - begin) // first.dtype.itemsize
        memory = area.tensor(begin - start, numel, first.dtype)
        members.append(Stretch(tuple(group), begin, memory))
    size = end - start
    source = TensorSlice("", (size,), (1,), "uint8", run[0][0].file, start, start, size)
    yield Neighbours(tuple(members), source, area.whole)
