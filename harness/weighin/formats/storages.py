"""Compute how much memory the tensors of a checkpoint need, and how much their storages.

``torch.save`` writes the whole storage of each tensor: a slice of a large tensor has a storage that is
larger than its elements, and an expanded tensor has one that is smaller. A loader that calls
``torch.load`` holds the storages, and a model holds the elements. This module uses only the standard
library.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weighin.formats.base import TensorSlice
from weighin.formats.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sizes of a checkpoint in bytes.

    Attributes:
        tensor_bytes: the elements of all tensors, which a model holds; tied tensors count once.
        storage_bytes: the storages, which ``torch.load`` reads.
        used_bytes: the parts of the storages to which a tensor refers.
        repeated: the names of the tensors with more elements than their storage.
    """

    tensor_bytes: int
    storage_bytes: int
    used_bytes: int
    repeated: tuple[str, ...] = ()

    @property
    def unused_bytes(self) -> int:
        """The parts of the storages that belong to no tensor."""
        return self.storage_bytes - self.used_bytes


def ties(slices: Sequence[TensorSlice]) -> dict[str, str]:
    """Return a dict that maps each tied tensor to the first tensor of the same elements."""
    firsts: dict[object, str] = {}
    found = {}
    for one in slices:
        first = firsts.setdefault(one.place, one.name) if one.nbytes else one.name
        if first != one.name:
            found[one.name] = first
    return found


def footprint(slices: Sequence[TensorSlice]) -> Footprint:
    """Return the sizes of these tensors and their storages."""
    tied = ties(slices)
    sizes: dict[tuple[Path, int], int] = {}
    spans: dict[tuple[Path, int], list[tuple[int, int]]] = {}
    for one in (part for whole in slices for part in _blocks(whole) if part.storage_bytes):
        storage = one.file, one.storage_offset
        sizes[storage] = max(sizes.get(storage, 0), one.storage_bytes)
        spans.setdefault(storage, []).append((one.offset, one.offset + _reach(one)))
    return Footprint(
        tensor_bytes=sum(one.nbytes for one in slices if one.name not in tied),
        storage_bytes=sum(sizes.values()),
        used_bytes=sum(map(_covered, spans.values())),
        repeated=tuple(one.name for one in slices if not one.parts and one.nbytes > _reach(one)),
    )


def _blocks(whole: TensorSlice) -> Sequence[TensorSlice]:
    return [part.where for part in whole.parts] or [whole]


def _reach(one: TensorSlice) -> int:
    """Return the number of bytes from a tensor's first to its last element, gaps included."""
    return one.span * ITEM_BYTES[one.dtype_name]


def _covered(spans: list[tuple[int, int]]) -> int:
    """Return the number of bytes in at least one of these intervals."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
