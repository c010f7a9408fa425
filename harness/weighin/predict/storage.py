"""One storage of a symbolic run: where it pretends to be, and which of its pages were written."""

import weakref
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from weighin.predict.allocator import CudaBlock
from weighin.predict.extents import Extents
from weighin.predict.heap import Chunk
from weighin.units import KIB

Place = Literal["host", "pinned", "file", "cuda", "meta"]

SMALL_BYTES: Final = 64 * KIB
"""Storages up to this size are written for real: they may hold what the code looks at."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """One storage.

    Attributes:
        chunks: where it lies in each of the ledger's heaps.
        real: whether the process itself holds it, because what is written is written for real.
        known: whether its values are those that a real run would have.
    """

    place: Place
    address: int
    nbytes: int
    chunks: tuple[Chunk, ...] = ()
    real: bool = False
    known: bool = True
    pages: Extents = field(default_factory=Extents)
    cuda: CudaBlock | None = None
    storage: "FollowedStorage | None" = None
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


class FollowedStorage(weakref.ref[torch.UntypedStorage]):
    """Knows the block of a storage, and calls back when the storage is freed."""

    __slots__ = ("block",)
    block: MemoryBlock


@dataclass(slots=True, eq=False)
class MappedFile:
    """A file that is mapped, from its first to its last slice."""

    path: str
    address: int
    nbytes: int
    pages: Extents = field(default_factory=Extents)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and how many bytes its elements span."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
