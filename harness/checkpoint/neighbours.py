"""Memory for what a checkpoint holds; what lies side by side in a file lies so in memory, too.

One read fills neighbours then, across the borders between tensors: as much at once as the disk, or
a copy of what is cached, is fastest with. They share huge pages, where each alone would end in small
ones. Each still is a storage of its own, whose memory is given back with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

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
    run: list[_Stay] = []
    for group in groups:
        stay = _stay(group, targets, dtype) if device.type == "cpu" else None
        if run and not (stay and stay.follows(run[-1])):
            yield from _together(run)
            run = []
        if stay:
            run.append(stay)
        elif group[0].parts:
            yield blocks.prepare(group, targets, device, dtype)
        else:
            yield filling.prepare(group, targets, device, dtype)
    yield from _together(run)


class _Stay(NamedTuple):
    """A group whose bytes are read into fresh memory as they are, and where in its file they lie."""

    group: Group
    start: int
    end: int
    dtype: torch.dtype

    def follows(self, before: "_Stay") -> bool:
        return (
            self.group[0].file == before.group[0].file
            and 0 <= self.start - before.end <= MOST_BETWEEN_BYTES
        )


def _stay(
    group: Group, targets: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> _Stay | None:
    """Return what is known of a group if its bytes stay what they are, and it has no memory yet."""
    first = group[0]
    kind = first.dtype
    if first.parts or final_dtype(first, dtype) != kind:
        return None
    start, end = span(group)
    if start % kind.itemsize or start == end:
        return None
    if own_memory(group, targets, _CPU, kind) is not None:
        return None
    return _Stay(group, start, end, kind)


def _together(run: Sequence[_Stay]) -> Iterator[Fillable]:
    """Yield memory for groups of one file that follow each other and stay as they are."""
    if not run:
        return
    start = run[0].start
    size = run[-1].end - start
    if len(run) == 1 or size < HUGE_PAGE_BYTES:
        yield from (filling.prepare(stay.group, {}, _CPU, None) for stay in run)
        return
    area = Area(size, start)
    members = []
    for group, begin, end, dtype in run:
        memory = area.tensor(begin - start, (end - begin) // dtype.itemsize, dtype)
        members.append(Stretch(tuple(group), begin, memory))
    source = TensorSlice("", (size,), (1,), "uint8", run[0].group[0].file, start, start, size)
    yield Neighbours(tuple(members), source, area.whole)
