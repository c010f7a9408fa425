"""Use the memory of tensors that are filled last as read buffers for tensors that are converted first.

A disk is fastest with large reads, but a read whose values change their dtype needs a buffer of the
read's size. Memory of the largest tensors to convert serves as such buffers until they are filled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import Final

from weighin.loader.direct_io import PIECE_BYTES
from weighin.loader.huge_pages import HUGE_PAGE_BYTES, memory_of
from weighin.loader.pieces import Fill, Piece, cut
from weighin.loader.vectored import ALIGNMENT

LENT_BYTES: Final = 12 * HUGE_PAGE_BYTES
"""The largest size in bytes of a buffer in a tensor's memory. Reads into such a buffer are no larger."""

_LEAST_BYTES: Final = 2 * PIECE_BYTES  # a smaller buffer is no faster than a reader's own of 1 MiB


@dataclass(frozen=True, slots=True)
class Lent:
    """All reads of a load. The ``borrowers`` run first, with the targets of ``lenders`` as buffers."""

    lenders: tuple[Piece, ...]
    borrowers: Iterator[Piece]


def lend(stretches: Sequence[Fill], most_bytes: int, threads: int) -> Lent:
    """Divide the reads into lenders, whose targets serve as buffers, and borrowers, which use these.

    The lenders are parts of the largest tensors that change their dtype, at most one part for each
    thread. All lenders together have at most half of the bytes of all tensors that change their dtype.

    Args:
        most_bytes: the largest size of the memory that one borrower fills.
    """
    able = [one for one in stretches if one.converts and one.memory.device.type == "cpu"]
    left = sum(stretch.memory.nbytes for stretch in able) // 2
    each = left // threads // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    each = max(_LEAST_BYTES, min(LENT_BYTES, each))
    lenders: list[Piece] = []
    others: dict[int, list[Piece]] = {}
    for stretch in sorted(able, key=lambda stretch: stretch.memory.nbytes, reverse=True):
        if len(lenders) == threads or left < _LEAST_BYTES:
            break
        own = others[id(stretch)] = []
        for piece in stretch.pieces(each):
            size = piece.target.nbytes
            lends = _LEAST_BYTES <= size <= left and piece.target.is_contiguous()
            if lends and len(lenders) < threads:
                lenders.append(piece)
                left -= size
            else:
                own.append(piece)

    def left_of(stretch: Fill) -> Iterable[Piece]:
        return others.get(id(stretch), stretch.pieces(most_bytes))

    adjacent = (left_of(stretch) for stretch in stretches if not stretch.scattered)
    scattered = (left_of(stretch) for stretch in stretches if stretch.scattered)
    pieces = chain(chain.from_iterable(adjacent), merge(*scattered, key=_place))
    return Lent(tuple(lenders), (part for piece in pieces for part in _parts(piece)))


def _place(piece: Piece) -> tuple[str, int]:
    """Return a sort key (file, offset), so that one read can fill adjacent parts of several tensors."""
    return str(piece.source.file), piece.offset


def _parts(piece: Piece) -> Iterator[Piece]:
    """Yield a read, divided into parts of 2 MiB if it uses a buffer, which holds several such parts."""
    if piece.buffered and piece.target.is_contiguous():
        yield from cut(piece.source, piece.offset, piece.target, HUGE_PAGE_BYTES)
    else:
        yield piece


def buffer_in(lender: Piece) -> memoryview:
    """Return the memory of the target of ``lender`` from its first page boundary on, as a buffer."""
    return memory_of(lender.target)[-lender.target.data_ptr() % ALIGNMENT :]
