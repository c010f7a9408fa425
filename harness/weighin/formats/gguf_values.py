"""Compute the elements of a quantised tensor of a GGUF file, with the package gguf."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from weighin.errors import CheckpointError, extra
from weighin.formats.base import TensorSlice
from weighin.formats.foreign import AGAIN
from weighin.formats.gguf import TYPES, check_decoded
from weighin.text import shown

_BLOCKS: Final = {name: (kind, block, size) for kind, (name, block, size) in TYPES.items()}
_ROW_ELEMENTS: Final = 64 * 1024  # the package gguf computes 16 rows at once, in some 20 MiB
# Of the rows that are yielded: the heap keeps the memory of larger arrays after they are freed.
_FEW_ELEMENTS: Final = 32 * 1024


def rows(where: TensorSlice) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in order, as float32 tensors of whole rows, some 32,768 elements each.

    Raises:
        CheckpointError, ConfigError: as for ``decoded``.
    """
    columns = where.shape[-1]
    count = max(1, _FEW_ELEMENTS // max(1, columns)) * columns
    pieces = decoded(where, count) if where.encoding else _read(where, count)
    if where.nbytes:
        yield from (piece.view(-1, columns) for piece in pieces)


def _read(where: TensorSlice, piece_elements: int) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor that is not quantised, as flat tensors in float32."""
    for content in _stored(where, where.nbytes, piece_elements * where.dtype.itemsize):
        yield torch.frombuffer(bytearray(content), dtype=where.dtype).float()


def _stored(where: TensorSlice, all_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    with where.file.open("rb") as file:
        file.seek(where.offset)
        for start in range(0, all_bytes, piece_bytes):
            content = file.read(min(piece_bytes, all_bytes - start))
            if len(content) < min(piece_bytes, all_bytes - start):
                raise CheckpointError(
                    f"{where.file}: another program truncated the file while weighin read it", AGAIN
                )
            yield content


def decoded(where: TensorSlice, piece_elements: int) -> Iterator[torch.Tensor]:
    """Yield the elements in order, as flat float32 tensors of whole blocks.

    Each tensor has at most ``piece_elements`` elements.

    Raises:
        CheckpointError: the package cannot dequantise this type, or the file was cut off.
        ConfigError: the package gguf is not installed.
    """
    check_decoded([where])
    with extra("gguf", f"reading {shown(where.name)}, which is quantised to {where.encoding},"):
        from gguf import GGMLQuantizationType, quants
    kind, block, size = _BLOCKS[where.encoding]
    row = _ROW_ELEMENTS // block
    for content in _stored(where, where.storage_bytes, piece_elements // block * size):
        codes, blocks = np.frombuffer(content, np.uint8), len(content) // size
        whole = blocks // row * row
        parts = (
            codes[: whole * size].reshape(-1, row * size),
            codes[whole * size :].reshape(1, -1),
        )
        piece = torch.empty(blocks * block)
        at = 0
        for part in parts:
            if not part.size:
                continue
            with np.errstate(all="ignore"):  # a scale may be infinite
                values = quants.dequantize(part, GGMLQuantizationType(kind))
            piece[at : at + values.size] = torch.from_numpy(values.reshape(-1))
            at += values.size
        yield piece
