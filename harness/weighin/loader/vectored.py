"""One read from a disk for several targets: what lies alike goes straight there, the rest by a buffer.

A disk reads whole pages of a file into whole pages of memory. Where a target lies in memory as in
the file, all its pages but the first and the last can be read into it. These, and small targets
between, pass a buffer, which takes its turn in the same call: a small read of its own would wait for
all the large ones that were asked for before.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

ALIGNMENT: Final = 4096
"""Of O_DIRECT, in bytes: 512 would do for most files, this for all but those that ask for more."""

_LEAST_STRAIGHT_BYTES: Final = 16 * ALIGNMENT  # what is less is copied as fast


@dataclass(frozen=True, slots=True)
class Gathered:
    """A read at ``offset`` into all ``buffers`` in turn, of which ``wanted_bytes`` must be there.

    ``copies`` are to be made afterwards: targets, and where in the buffer their bytes lie then.
    """

    offset: int
    wanted_bytes: int
    buffers: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]


def gather(
    places: Sequence[tuple[memoryview, int]], bounce: memoryview, alignment: int = ALIGNMENT
) -> Gathered | None:
    """Return the read that fills all targets, given with their offsets in the file; None if it needs more buffer.

    Args:
        places: in the order of the file, none over another.
        bounce: the buffer, which begins where a page does.
        alignment: of the file, in bytes.
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
        buffers += [one for one in (passing, view) if len(one)]
        for target, offset in places:
            low, high = max(first, offset), min(last, offset + len(target))
            if low < high:
                copies.append(
                    (target[low - offset : high - offset], passing[low - first : high - first])
                )
    return Gathered(start, places[-1][1] + len(places[-1][0]) - start, buffers, copies)


def address_of(view: memoryview) -> int:
    """Return where in memory a view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def down(offset: int, alignment: int) -> int:
    """Return the last multiple of the alignment up to an offset."""
    return offset - offset % alignment


def up(offset: int, alignment: int) -> int:
    """Return the first multiple of the alignment from an offset on."""
    return down(offset + alignment - 1, alignment)


def _straight(place: tuple[memoryview, int], alignment: int) -> tuple[int, int, memoryview] | None:
    """Return from where to where in the file a disk can read into the target itself, and that part of it."""
    target, offset = place
    first, last = up(offset, alignment), down(offset + len(target), alignment)
    if last - first < _LEAST_STRAIGHT_BYTES or (address_of(target) - offset) % alignment:
        return None
    return first, last, target[first - offset : last - offset]
