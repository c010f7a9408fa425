"""Fill several targets by one vectored read: large targets directly, small ones through a buffer.

A direct read transfers whole pages of a file to whole pages of memory. The pages that lie wholly in a
large target receive its bytes without a buffer. If a target lies otherwise to pages in memory than in the
file, these bytes are then moved to their place, by less than a page. The bytes at the ends of a target,
and small targets, are read into a buffer by the same call, because a separate small read would wait for
the large reads that were submitted before it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

ALIGNMENT: Final = 4096
"""The alignment of O_DIRECT reads, in bytes. 512 suffices for most files, 4096 for nearly
all files."""

_LEAST_STRAIGHT_BYTES: Final = 16 * ALIGNMENT  # smaller targets are as fast through the buffer


@dataclass(frozen=True, slots=True)
class Gathered:
    """A read at ``offset`` into all ``buffers`` in turn; the file must have ``wanted_bytes`` there.

    ``copies`` must be made after the read, in their order. Each copy is a part of a target, and its bytes:
    in the buffer, or in the target itself, less than a page away.
    """

    offset: int
    wanted_bytes: int
    buffers: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]


def gather(
    places: Sequence[tuple[memoryview, int]], bounce: memoryview, alignment: int = ALIGNMENT
) -> Gathered | None:
    """Return the read that fills all targets; None if it needs a larger buffer.

    Args:
        places: the targets with their offsets in the file, in the file's order, without overlaps.
        bounce: the buffer, which begins at a page boundary.
        alignment: the alignment that direct reads of the file need, in bytes.
    """
    start, stop = down(places[0][1], alignment), up(places[-1][1] + len(places[-1][0]), alignment)
    found = ((place, _straight(place, alignment)) for place in places)
    pages = [(place, straight) for place, straight in found if straight]
    nothing = bounce[:0]
    straights = [(start, start, nothing), *(one for _, one in pages), (stop, stop, nothing)]
    buffers: list[memoryview] = []
    copies = [
        (target[first - offset : last - offset], view)
        for (target, offset), (first, last, view) in pages
        if address_of(view) - address_of(target) != first - offset
    ]
    used = 0
    for (_, first, _), (last, _, view) in pairwise(straights):
        if used + last - first > len(bounce):
            return None
        passing = bounce[used : used + last - first]
        used += last - first
        buffers += [buffer for buffer in (passing, view) if len(buffer)]
        for target, offset in places:
            low, high = max(first, offset), min(last, offset + len(target))
            if low < high:
                copies.append(
                    (target[low - offset : high - offset], passing[low - first : high - first])
                )
    return Gathered(start, places[-1][1] + len(places[-1][0]) - start, buffers, copies)


def address_of(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def down(offset: int, alignment: int) -> int:
    """Return the offset rounded down to a multiple of the alignment."""
    return offset - offset % alignment


def up(offset: int, alignment: int) -> int:
    """Return the offset rounded up to a multiple of the alignment."""
    return down(offset + alignment - 1, alignment)


def _straight(place: tuple[memoryview, int], alignment: int) -> tuple[int, int, memoryview] | None:
    """Return the start and end in the file, and the memory, of a target's part for direct reads.

    The memory is whole pages of the target. The part belongs there, or less than a page away. The result
    is None if the part is small.
    """
    target, offset = place
    first, page = up(offset, alignment), -address_of(target) % alignment
    last = min(down(offset + len(target), alignment), first + down(len(target) - page, alignment))
    if last - first < _LEAST_STRAIGHT_BYTES:
        return None
    return first, last, target[page : page + last - first]
