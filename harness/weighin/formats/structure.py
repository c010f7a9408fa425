"""Write the names, shapes and dtypes of a checkpoint's tensors as one short string, and read the
string.

A record of a measurement contains this string, so that the record alone identifies the model. The
string is JSON, compressed with zlib and written in base64: 3 KiB for GPT-2 XL.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from weighin.errors import CheckpointError, ConfigError
from weighin.formats.base import TensorSlice
from weighin.formats.dtypes import ITEM_BYTES, is_sizes

_LONGEST: Final = 96 * 1024  # Linux limits one argument of a process to 128 KiB
_MOST_BYTES: Final = 64 * 1024 * 1024  # of JSON text, because records may be forged


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor. ``tied_to`` names the first tensor with the same stored elements, or is None."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    tied_to: str | None


def pack(slices: Sequence[TensorSlice]) -> str:
    """Return the names, shapes, dtypes and ties of a checkpoint's tensors as a string.

    Raises:
        CheckpointError: the checkpoint has no tensors, or its string is longer than 96 KiB.
    """
    if not slices:
        raise CheckpointError("the checkpoint has no tensors", "use a checkpoint with weights")
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    firsts: dict[object, int] = {}
    names, kind_of, tied_to = [], [], []
    for number, one in enumerate(slices):
        first = firsts.setdefault(one.place, number) if one.nbytes else number
        names.append(one.name)
        kind_of.append(kinds.setdefault((one.dtype_name, one.shape), len(kinds)))
        tied_to.append(number - first)  # mostly 0
    columns = [names, kind_of, tied_to, [[dtype, *shape] for dtype, shape in kinds]]
    data = json.dumps(columns, separators=(",", ":")).encode()
    text = base64.urlsafe_b64encode(zlib.compress(data, 9)).decode()
    if len(text) > _LONGEST:
        raise CheckpointError(
            f"the checkpoint has {len(slices):,} tensors, too many for weighin to build the model without its code",
            "name the function that builds the model: --model package.module:callable",
        )
    return text


def unpack(text: str) -> list[TensorShape]:
    """Return the tensors that ``pack`` wrote; raise ConfigError for any other string."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.urlsafe_b64decode(text), _MOST_BYTES)
        return _tensors(json.loads(data))
    except (ValueError, TypeError, IndexError, RecursionError, binascii.Error, zlib.error) as error:
        raise ConfigError(
            f"the argument `tensors` of the model is not a list of a checkpoint's tensors: {error}",
            "name the checkpoint: --model from:CHECKPOINT",
        ) from None


def _tensors(columns: Any) -> list[TensorShape]:
    names, kind_of, tied_to, kinds = columns
    tensors = []
    for number, (name, kind, back) in enumerate(zip(names, kind_of, tied_to, strict=True)):
        dtype, *shape = kinds[kind]
        if not (isinstance(name, str) and dtype in ITEM_BYTES and is_sizes(tuple(shape))):
            raise ValueError(f"tensor {number} is malformed")
        first = names[number - back] if 0 < back <= number else None
        tensors.append(TensorShape(name, tuple(shape), dtype, first))
    return tensors
