"""Fill several targets by one vectored read: large targets directly, small targets through a buffer.

A direct read (``O_DIRECT``) transfers whole pages of a file to whole pages of memory. The kernel
writes directly to the pages that lie wholly in a large target. If a target's offset within a page
differs in memory and in the file, its bytes are afterwards moved by less than a page. The first and
last bytes of a target, and small targets, pass through a buffer. One system call reads both direct
and buffered parts, because a separate small read would have to wait for the large reads before it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

ALIGNMENT: Final = 4096
"""The alignment of O_DIRECT reads in bytes: most file systems need 512, and few need more than 4096."""

_LEAST_STRAIGHT_BYTES: Final = 16 * ALIGNMENT  # smaller targets are as fast through the buffer


@dataclass(frozen=True, slots=True)
class Gathered:
    """A read of ``wanted_bytes`` at ``offset`` of a file, which fills ``buffers`` one after the other.

    After the read, the ``copies`` must be made in their order. Each copy is (destination, source).
    The destination is a part of a target. The source is in the buffer for small targets, or in the
    same target less than a page away.
    """

    offset: int
    wanted_bytes: int
    buffers: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]


def gather(
    places: Sequence[tuple[memoryview, int]], bounce: memoryview, alignment: int = ALIGNMENT
) -> Gathered | None:
    """Return one read that fills all targets; None if the buffer is too small for this read.

    Args:
        places: the targets with their offsets in the file, in the file's order, without overlaps.
        bounce: the buffer for small targets; it begins at a page boundary.
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
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def down(offset: int, alignment: int) -> int:
    return offset - offset % alignment


def up(offset: int, alignment: int) -> int:
    return down(offset + alignment - 1, alignment)


def _straight(place: tuple[memoryview, int], alignment: int) -> tuple[int, int, memoryview] | None:
    """Return (start, end, memory): a range of the file, and the part of a target to read it into.

    The memory consists of whole pages of the target, and lies less than one page from where the bytes
    belong. ``_straight`` returns None if the range has less than 64 KiB.
    """
    target, offset = place
    first, page = up(offset, alignment), -address_of(target) % alignment
    last = min(down(offset + len(target), alignment), first + down(len(target) - page, alignment))
    if last - first < _LEAST_STRAIGHT_BYTES:
        return None
    return first, last, target[page : page + last - first]
