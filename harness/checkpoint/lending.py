"""Memory that is still to be filled lends itself as buffers for what is read and converted before.

A disk wants large reads, and a load that converts has no memory for them to spare: but the largest
tensors have, until it is their turn. They are filled last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from harness.checkpoint.direct import PIECE_BYTES
from harness.checkpoint.gathering import ALIGNMENT
from harness.checkpoint.memory import HUGE_PAGE_BYTES, memory_of

if TYPE_CHECKING:
    from harness.checkpoint.filling import Fillable

LENT_BYTES: Final = 8 * HUGE_PAGE_BYTES
"""The most that one buffer takes: what a thread reads at once."""

_LEAST_BYTES: Final = 2 * PIECE_BYTES  # less is no better than a reader's own buffer


@dataclass(frozen=True, slots=True)
class Lent:
    """``buffers`` lie in the memory of ``lenders``, for ``borrowers`` to be read by way of them."""

    buffers: tuple[memoryview, ...]
    borrowers: tuple["Fillable", ...]
    lenders: tuple["Fillable", ...]


def lend(stretches: Sequence["Fillable"], threads: int) -> Lent:
    """Return a buffer for each thread, as far as the largest stretches have memory.

    Where nothing is converted, or all would have to lend, there are no buffers and no lenders.
    """
    able = [one for one in stretches if _converts(one) and one.memory.nbytes >= _LEAST_BYTES]
    buffers: list[memoryview] = []
    lenders: list[Fillable] = []
    for one in sorted(able, key=lambda one: one.memory.nbytes, reverse=True):
        if len(buffers) < threads:
            buffers += _cut(one)
            lenders.append(one)
    borrowers = tuple(one for one in stretches if one not in lenders)
    if not any(map(_converts, borrowers)):
        return Lent((), tuple(stretches), ())
    return Lent(tuple(buffers[:threads]), borrowers, tuple(lenders))


def _converts(one: "Fillable") -> bool:
    return one.memory.device.type == "cpu" and one.memory.dtype != one.slices[0].dtype


def _cut(one: "Fillable") -> list[memoryview]:
    """Return the stretch's memory in buffers that begin where pages do."""
    skip = -one.memory.data_ptr() % ALIGNMENT
    memory = memory_of(one.memory)[skip:]
    cuts = (memory[at : at + LENT_BYTES] for at in range(0, len(memory), LENT_BYTES))
    return [buffer for buffer in cuts if len(buffer) >= _LEAST_BYTES]
