"""Fill several targets by one vectored read, aligned targets directly, others through a buffer.

A direct read transfers whole pages of a file to whole pages of memory. If a target has the same
alignment in memory as in the file, all its pages except the first and the last can be read straight
into it. The first and the last page, and small targets, are read into a buffer by the same call,
because a separate small read would wait for the large reads that were submitted before it.
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

    ``copies`` must be made after the read: each one is a target and the bytes for it in the buffer.
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
    straight = [
        (start, start, bounce[:0]),
        *filter(None, (_straight(place, alignment) for place in places)),
        (stop, stop, bounce[:0]),
    ]
    buffers: list[memoryview] = []
    copies: list[tuple[memoryview, memoryview]] = []
    used = 0
    for (_, first, _), (last, _, view) in pairwise(straight):
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

    The result is None if the alignments differ or the part is small.
    """
    target, offset = place
    first, last = up(offset, alignment), down(offset + len(target), alignment)
    if last - first < _LEAST_STRAIGHT_BYTES or (address_of(target) - offset) % alignment:
        return None
    return first, last, target[first - offset : last - offset]
