"""Compare and describe the tensors of a checkpoint, and compute the bytes of tensors and storages.

``torch.save`` writes the whole storage of each tensor. The storage of a slice has more bytes than
the slice, and the storage of an expanded tensor has fewer. ``torch.load`` reads the whole storages
into memory; a model has memory only for the elements.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError, ConfigError
from weighin.formats.base import TensorSlice
from weighin.formats.dtypes import ITEM_BYTES, is_sizes
from weighin.formats.foreign import unreadable

_FIRST_BYTES: Final = 4096  # different tensors nearly always differ here
_PIECE_BYTES: Final = 4 * 1024**2
_LONGEST: Final = 96 * 1024  # Linux limits one argument of a process to 128 KiB
_MOST_BYTES: Final = 64 * 1024 * 1024  # of JSON text, because records may be forged


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sizes of a checkpoint in bytes.

    Attributes:
        tensor_bytes: the size of all tensors' elements; tied tensors count once.
        storage_bytes: the size of all tensors' storages.
        used_bytes: the part of ``storage_bytes`` that belongs to at least one tensor.
        repeated: the names of the expanded tensors, whose storages have fewer bytes than the
            tensors.
    """

    tensor_bytes: int
    storage_bytes: int
    used_bytes: int
    repeated: tuple[str, ...] = ()

    @property
    def unused_bytes(self) -> int:
        """The part of ``storage_bytes`` that belongs to no tensor, such as that outside a slice."""
        return self.storage_bytes - self.used_bytes


def ties(slices: Sequence[TensorSlice]) -> dict[str, str]:
    """Return a dict from each further name of a tied tensor to the tensor's first name."""
    firsts: dict[object, str] = {}
    found = {}
    for one in slices:
        first = firsts.setdefault(one.place, one.name) if one.nbytes else one.name
        if first != one.name:
            found[one.name] = first
    return found


def are_equal(one: TensorSlice, other: TensorSlice) -> bool:
    """Tell whether two tensors of the same shape have the same dtype and the same bytes.

    ``are_equal`` reads both tensors up to the first difference.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if (one.file, one.offset) == (other.file, other.offset):
        return one.stride == other.stride
    if one.dtype_name != other.dtype_name or one.nbytes != other.nbytes:
        return False
    return all(a == b for a, b in zip(_pieces(one), _pieces(other), strict=True))


def _pieces(where: TensorSlice) -> Iterator[bytes]:
    try:
        with where.file.open("rb") as file:
            file.seek(where.offset)
            yield file.read(min(_FIRST_BYTES, where.nbytes))
            for start in range(_FIRST_BYTES, where.nbytes, _PIECE_BYTES):
                yield file.read(min(_PIECE_BYTES, where.nbytes - start))
    except OSError as error:
        raise unreadable(where.file, error) from error


def footprint(slices: Sequence[TensorSlice]) -> Footprint:
    tied = ties(slices)
    sizes: dict[tuple[Path, int], int] = {}
    spans: dict[tuple[Path, int], list[tuple[int, int]]] = {}
    blocks = chain.from_iterable([part.where for part in one.parts] or [one] for one in slices)
    for one in (block for block in blocks if block.storage_bytes):
        storage = one.file, one.storage_offset
        sizes[storage] = max(sizes.get(storage, 0), one.storage_bytes)
        spans.setdefault(storage, []).append((one.offset, one.offset + _reach(one)))
    return Footprint(
        tensor_bytes=sum(one.nbytes for one in slices if one.name not in tied),
        storage_bytes=sum(sizes.values()),
        used_bytes=sum(map(_covered, spans.values())),
        repeated=tuple(one.name for one in slices if not one.parts and one.nbytes > _reach(one)),
    )


def _reach(one: TensorSlice) -> int:
    return one.span * ITEM_BYTES[one.dtype_name]


def _covered(spans: list[tuple[int, int]]) -> int:
    """Return the number of bytes that lie in at least one of the intervals."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def pack(slices: Sequence[TensorSlice]) -> str:
    """Return the names, shapes, dtypes and ties of a checkpoint's tensors as one short string.

    A record of a measurement contains this string, so that the record alone identifies the model. The
    string is JSON, compressed with zlib and written in base64: 3 KiB for GPT-2 XL.

    Raises:
        CheckpointError: the checkpoint has no tensors, or its string is longer than 96 KiB.
    """
    if not slices:
        raise CheckpointError("the checkpoint has no tensors", "use a checkpoint with weights")
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind_of = [kinds.setdefault((one.dtype_name, one.shape), len(kinds)) for one in slices]
    names, tied = [one.name for one in slices], ties(slices)
    numbers = {name: number for number, name in enumerate(names)}
    tied_to = [numbers[name] - numbers[tied.get(name, name)] for name in names]  # mostly 0
    columns = [names, kind_of, tied_to, [[dtype, *shape] for dtype, shape in kinds]]
    data = json.dumps(columns, separators=(",", ":")).encode()
    text = base64.urlsafe_b64encode(zlib.compress(data, 9)).decode()
    if len(text) > _LONGEST:
        raise CheckpointError(
            f"the checkpoint has {len(slices):,} tensors, too many for weighin to build the model without its code",
            "name the function that builds the model: --model package.module:callable",
        )
    return text


def unpack(text: str) -> list[tuple[str, tuple[int, ...], str, str | None]]:
    """Return the name, shape and dtype of each tensor that ``pack`` wrote, and the first name of a tied
    tensor or None.

    Raises:
        ConfigError: ``pack`` did not write the string.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.urlsafe_b64decode(text), _MOST_BYTES)
        return _tensors(json.loads(data))
    except (ValueError, TypeError, IndexError, RecursionError, binascii.Error, zlib.error) as error:
        raise ConfigError(
            f"the argument `tensors` of the model is not a list of a checkpoint's tensors: {error}",
            "name the checkpoint: --model from:CHECKPOINT",
        ) from None


def _tensors(columns: Any) -> list[tuple[str, tuple[int, ...], str, str | None]]:
    names, kind_of, tied_to, kinds = columns
    tensors = []
    for number, (name, kind, back) in enumerate(zip(names, kind_of, tied_to, strict=True)):
        dtype, *shape = kinds[kind]
        if not (isinstance(name, str) and dtype in ITEM_BYTES and is_sizes(tuple(shape))):
            raise ValueError(f"tensor {number} is malformed")
        first = names[number - back] if 0 < back <= number else None
        tensors.append((name, tuple(shape), dtype, first))
    return tensors
