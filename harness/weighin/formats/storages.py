"""Compute the bytes of a checkpoint's tensors, and the bytes of the storages that they view.

``torch.save`` writes the whole storage of each tensor. The storage of a slice has more bytes than the
slice, and the storage of an expanded tensor has fewer. ``torch.load`` reads the storages into memory; a
model has memory for the elements.
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
        tensor_bytes: the elements of all tensors; tied tensors count once.
        storage_bytes: the storages of all tensors.
        used_bytes: the bytes of the storages that belong to a tensor.
        repeated: the names of the expanded tensors: their storages have fewer bytes than they.
    """

    tensor_bytes: int
    storage_bytes: int
    used_bytes: int
    repeated: tuple[str, ...] = ()

    @property
    def unused_bytes(self) -> int:
        """The bytes of the storages that belong to no tensor, as of a slice's storage beside the slice."""
        return self.storage_bytes - self.used_bytes


def ties(slices: Sequence[TensorSlice]) -> dict[str, str]:
    """Return a dict from the name of each tied tensor to the first name of the same elements."""
    firsts: dict[object, str] = {}
    found = {}
    for one in slices:
        first = firsts.setdefault(one.place, one.name) if one.nbytes else one.name
        if first != one.name:
            found[one.name] = first
    return found


def footprint(slices: Sequence[TensorSlice]) -> Footprint:
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
    return one.span * ITEM_BYTES[one.dtype_name]


def _covered(spans: list[tuple[int, int]]) -> int:
    """Return the number of bytes in at least one of these intervals."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
