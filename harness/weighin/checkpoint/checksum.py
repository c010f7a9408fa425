"""Compute a checksum of a tensor's bytes at the speed of memory, on any device.

The computation reads every byte of a loaded model, as a measurement must. A CRC reads only 2 GB/s, and
would take longer than many loads; a plain sum does not detect swapped bytes. This checksum reads 13 GB/s:
it deals the 8-byte words of a 4 MiB chunk in turn to 65,521 lanes, adds up each lane, multiplies each
lane's sum by an odd constant, and chains the sums of the chunks. The number of lanes is a prime, so that
the words of a shifted row are in other lanes. Any single changed word changes the result.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from weighin.stream.slices import dtype_name

_LANES: Final = 65_521
CHUNK_BYTES: Final = _LANES * 8 * 8  # 4 MiB: with its lanes' sums, it fits into a processor's cache
_MULTIPLIER: Final = 6364136223846793005  # Knuth's MMIX; odd, so that multiplying loses no bits
_MASK: Final = 2**64 - 1

_weights: dict[torch.device, torch.Tensor] = {}
_computing = threading.Lock()

# In which loads have floating-point weights.
CELL_DTYPES: Final = ("float32", "bfloat16", "float16")
PIECE_ELEMENTS: Final = CHUNK_BYTES
"""How many elements a piece has: 16 MiB in float32, and whole chunks of ``RunningChecksum`` in any dtype."""

Sums = dict[str, dict[str, str]]
"""The checksums of tensors, by name and dtype. Threads may set different items at the same time."""


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of the elements in row-major order, as 16 hexadecimal digits."""
    running = RunningChecksum(tensor.numel() * tensor.element_size())
    for piece in pieces_of(tensor, CHUNK_BYTES // tensor.element_size()):
        running.update(piece)
    return running.hexdigest()


class RunningChecksum:
    """The checksum of a tensor whose elements arrive in order, in pieces."""

    def __init__(self, total_bytes: int) -> None:
        self._value = total_bytes

    def update(self, piece: torch.Tensor) -> None:
        """Add the next contiguous piece; all pieces but the last must consist of whole chunks."""
        raw = piece.reshape(-1).view(torch.uint8)
        for start in range(0, raw.numel(), CHUNK_BYTES):
            chunk = raw[start : start + CHUNK_BYTES]
            aligned = chunk.storage_offset() % 8 == 0 and chunk.data_ptr() % 8 == 0
            if chunk.numel() % 8 or not aligned:  # zeros fill up the last 8-byte word
                padded = chunk.new_zeros(-(-chunk.numel() // 8) * 8)
                padded[: chunk.numel()] = chunk
                chunk = padded
            value = _chunk_value(chunk.view(torch.int64))
            self._value = (self._value * _MULTIPLIER + value) & _MASK

    def hexdigest(self) -> str:
        return f"{self._value:016x}"


def summing(
    name: str,
    pieces: Iterable[torch.Tensor],
    numel: int,
    dtype: torch.dtype,
    sums: Sums,
    *,
    is_kept: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield a tensor's pieces, and then put its checksum in each dtype of loads into ``sums``."""
    kinds = {dtype_name(dtype): dtype}
    if dtype.is_floating_point and not is_kept:
        kinds |= {kind: getattr(torch, kind) for kind in CELL_DTYPES}
    running = {kind: RunningChecksum(numel * one.itemsize) for kind, one in kinds.items()}
    for piece in pieces:
        for kind, one in running.items():
            one.update(piece.to(kinds[kind]))
        yield piece
    sums[name] = {kind: one.hexdigest() for kind, one in running.items()}


def pieces_of(tensor: torch.Tensor, elements: int = PIECE_ELEMENTS) -> Iterator[torch.Tensor]:
    """Yield a tensor in flat pieces of at most ``elements`` elements, in row-major order; views of a contiguous one."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from (flat[at : at + elements] for at in range(0, flat.numel(), elements))
    elif tensor.numel():
        rows = max(1, elements // tensor[0].numel())
        stretches = (tensor[at : at + rows] for at in range(0, len(tensor), rows))
        yield from cut((stretch.contiguous().view(-1) for stretch in stretches), elements)


def cut(
    stretches: Iterable[torch.Tensor], elements: int = PIECE_ELEMENTS
) -> Iterator[torch.Tensor]:
    """Yield the elements of flat tensors in pieces of ``elements``; the last piece may be shorter."""
    rest: torch.Tensor | None = None
    for stretch in stretches:
        rest = stretch if rest is None or not len(rest) else torch.cat([rest, stretch])
        while len(rest) >= elements:
            yield rest[:elements]
            rest = rest[elements:]
    if rest is not None and len(rest):
        yield rest


def _chunk_value(words: torch.Tensor) -> int:
    """Return the weighted sum of a chunk's lanes modulo 2**64, as int64 arithmetic wraps around."""
    weights = _lane_weights(words.device)
    rows = words.numel() // _LANES
    whole, rest = words[: rows * _LANES], words[rows * _LANES :]
    value = 0
    if rows:
        value += int((whole.view(rows, _LANES).sum(0) * weights).sum())
    if rest.numel():
        value += int((rest * weights[: rest.numel()]).sum()) * _MULTIPLIER
    return value & _MASK


def _lane_weights(device: torch.device) -> torch.Tensor:
    """Return one odd 64-bit constant for each lane: the splitmix64 sequence with the lowest bit set."""
    with _computing:  # without this lock, each thread would compute its own copy of the weights
        if device not in _weights:
            word = torch.arange(1, _LANES + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
            _weights[device] = ((word ^ ((word >> 31) & ((1 << 33) - 1))) | 1).to(device)
        return _weights[device]


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
