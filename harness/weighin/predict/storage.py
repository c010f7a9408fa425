"""One storage of a symbolic run: the memory that it would use in a real load, and its written
pages.
"""

import weakref
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from weighin.construction.tensors import extent as extent_in_storage
from weighin.predict.allocator import CudaBlock
from weighin.predict.extents import Extents
from weighin.predict.heap import Chunk
from weighin.units import KIB

Place = Literal["host", "pinned", "file", "cuda", "meta"]

SMALL_BYTES: Final = 64 * KIB
"""Storages up to this size are really written, because code may read their values."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """One tensor storage, and the memory that it would use in a real load.

    Attributes:
        chunks: the storage's chunk in each of the ledger's heaps.
        real: whether the storage is really written, and so uses memory of this process.
        known: whether the values are the same as in a real load.
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
    """A weak reference to a storage, with the storage's ``MemoryBlock``; its callback runs when the
    storage is freed.
    """

    __slots__ = ("block",)
    block: MemoryBlock


@dataclass(slots=True, eq=False)
class MappedFile:
    """A private mapping of a file, and those of its pages that were read."""

    path: str
    address: int
    nbytes: int
    pages: Extents = field(default_factory=Extents)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the number of bytes up to its last byte."""
    start, end = extent_in_storage(tensor)
    return tensor.data_ptr(), end - start
