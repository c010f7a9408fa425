"""One storage of a symbolic run: its simulated place, and which of its pages were written."""

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
"""Storages up to this size are really written, because code may read their values."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """One storage.

    Attributes:
        chunks: its chunk in each of the ledger's heaps.
        real: whether it is really written and so takes memory of this process.
        known: whether its values are those of a real run.
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
    """A weak reference to a storage that knows its block and calls back when it is freed."""

    __slots__ = ("block",)
    block: MemoryBlock


@dataclass(slots=True, eq=False)
class MappedFile:
    """A private map of a file, and which of its pages were read."""

    path: str
    address: int
    nbytes: int
    pages: Extents = field(default_factory=Extents)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte and the number of bytes that its elements span."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
