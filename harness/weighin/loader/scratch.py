"""Memory that is still to be filled lends itself as buffers for what is read and converted before.

A disk wants large reads, and a load that converts has no memory for them to spare: but the largest
tensors have, until it is their turn. They are filled last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from weighin.loader.direct_io import PIECE_BYTES
from weighin.loader.huge_pages import HUGE_PAGE_BYTES, memory_of
from weighin.loader.reads import Fillable, Piece, cut
from weighin.loader.vectored import ALIGNMENT

LENT_BYTES: Final = 12 * HUGE_PAGE_BYTES
"""The most that one piece lends: what a thread reads at once."""

_LEAST_BYTES: Final = 2 * PIECE_BYTES  # less is no better than a reader's own buffer


@dataclass(frozen=True, slots=True)
class Lent:
    """All reads to make: ``borrowers`` by way of the memory of ``lenders``, and then these."""

    lenders: tuple[Piece, ...]
    borrowers: Iterator[Piece]


def lend(stretches: Sequence[Fillable], most_bytes: int, threads: int) -> Lent:
    """Return the reads to make, of which up to one for each thread lends its memory first.

    The largest stretches lend that are converted, together at most half of what is.

    Args:
        most_bytes: that the read of a borrower fills.
    """
    able = [one for one in stretches if _converts(one)]
    left = sum(one.memory.nbytes for one in able) // 2
    each = left // threads // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    each = max(_LEAST_BYTES, min(LENT_BYTES, each))
    lenders: list[Piece] = []
    others: dict[int, list[Piece]] = {}
    for one in sorted(able, key=lambda one: one.memory.nbytes, reverse=True):
        if len(lenders) == threads or left < _LEAST_BYTES:
            break
        own = others[id(one)] = []
        for piece in one.pieces(each):
            size = piece.target.nbytes
            lends = _LEAST_BYTES <= size <= left and piece.target.is_contiguous()
            if lends and len(lenders) < threads:
                lenders.append(piece)
                left -= size
            else:
                own.append(piece)
    borrowers = (
        part
        for one in stretches
        for piece in others.get(id(one), one.pieces(most_bytes))
        for part in _parts(piece)
    )
    return Lent(tuple(lenders), borrowers)


def _parts(piece: Piece) -> Iterator[Piece]:
    """Yield a read as it is; what passes a buffer in parts, which fill whatever buffer takes them."""
    if piece.buffered and piece.target.is_contiguous():
        yield from cut(piece.source, piece.offset, piece.target, HUGE_PAGE_BYTES)
    else:
        yield piece


def buffer_in(lender: Piece) -> memoryview:
    """Return a piece's memory, from where a page begins."""
    return memory_of(lender.target)[-lender.target.data_ptr() % ALIGNMENT :]


def _converts(one: Fillable) -> bool:
    return one.converts and one.memory.device.type == "cpu"
