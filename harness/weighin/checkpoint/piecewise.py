"""Compute a tensor's checksums from pieces, in every dtype in which a load may be measured."""

from collections.abc import Iterable, Iterator
from typing import Final

import torch

from weighin.checkpoint.checksum import CHUNK_BYTES, RunningChecksum, checksum
from weighin.formats.dtypes import dtype_name

CELL_DTYPES: Final = ("float32", "bfloat16", "float16")
"""The dtypes in which a measurement may load floating-point weights."""

PIECE_ELEMENTS: Final = CHUNK_BYTES
"""The number of elements in a piece of a tensor. A piece has 16 MiB in float32. In any dtype, it
consists of whole chunks, as ``RunningChecksum`` needs."""


class Checksums:
    """The checksums of a tensor in its own dtype and, if floating-point, in all ``CELL_DTYPES``.

    With ``is_kept``, the tensor keeps its own dtype in every model, and has only the checksum in
    this dtype.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, is_kept: bool = False) -> None:
        names = CELL_DTYPES if dtype.is_floating_point and not is_kept else ()
        self._dtypes = {name: getattr(torch, name) for name in names}
        self._dtypes.setdefault(dtype_name(dtype), dtype)
        self._running = {
            name: RunningChecksum(numel * kind.itemsize) for name, kind in self._dtypes.items()
        }

    def update(self, piece: torch.Tensor) -> None:
        for name, running in self._running.items():
            running.update(piece.to(self._dtypes[name]))

    def result(self) -> dict[str, str]:
        return {name: running.hexdigest() for name, running in self._running.items()}


def tensor_checksums(tensor: torch.Tensor) -> dict[str, str]:
    """Return the checksums of a tensor by dtype.

    The computation needs 64 MiB of memory, or memory for a copy if the tensor is not contiguous.
    """
    sums = Checksums(tensor.numel(), tensor.dtype)
    if tensor.numel() and not tensor.is_contiguous():
        return {name: checksum(tensor.to(kind)) for name, kind in sums._dtypes.items()}
    for piece in pieces_of(tensor):
        sums.update(piece)
    return sums.result()


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a contiguous tensor's elements as flat views of at most ``PIECE_ELEMENTS`` elements."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), PIECE_ELEMENTS):
        yield flat[start : start + PIECE_ELEMENTS]


def checksummed(
    pieces: Iterable[torch.Tensor], running: Checksums, sums: dict[str, dict[str, str]], name: str
) -> Iterator[torch.Tensor]:
    """Yield the pieces of the tensor ``name``, and then put the tensor's checksums into ``sums``.

    Several threads may call this function with the same ``sums`` and different names.
    """
    for piece in pieces:
        running.update(piece)
        yield piece
    sums[name] = running.result()
