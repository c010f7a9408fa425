"""Making a seeded checkpoint for a model: right shapes and order, and values known to all.

A tensor's values depend on the seed, its name and the place in it, never on the format or the
order of writing. Runs in a process of its own; the largest things in memory are the constructor's
persistent buffers and a few pieces of 16 MiB.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

from weighin import formats
from weighin.checkpoint.describe import Described, buffer_checksums, describe, in_checkpoint
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.piecewise import PIECE_ELEMENTS, Checksums, checksummed, pieces_of
from weighin.formats.base import Pieces, Progress, TensorPlan
from weighin.models.skeleton import map_large_tensors

_STANDARD_DEVIATION: Final = 0.02
_SCALES: Final = frozenset({"weight", "scale", "gamma"})
RECORD_BYTES: Final = 4096  # what one tensor's file or record needs beside the tensor, at most


@dataclass(frozen=True, slots=True)
class Made:
    """What was made, and the seconds of each stage."""

    manifest: Manifest
    seconds: dict[str, float]


def needed_bytes(described: Iterable[Described]) -> int:
    """Return the disk space that a checkpoint of these tensors takes at most, in any format."""
    return sum(
        RECORD_BYTES + (0 if one.shared_with else one.tensor.nbytes)
        for one in in_checkpoint(list(described))
    )


def make(
    model: str,
    builder: str,
    kwargs: Mapping[str, Any],
    *,
    seed: int,
    fmt: str,
    folder: Path,
    permit: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> Made:
    """Write a checkpoint into ``folder``, which must be empty, and ``manifest.json`` beside it.

    ``permit`` is called with the bytes that will be needed before anything is written.

    Raises:
        ConfigError: the builder cannot be used.
    """
    formats.named(fmt)
    map_large_tensors()
    torch.set_num_threads(1)  # the writers are the threads
    started = time.monotonic()
    described = describe(builder, kwargs, real_buffers="all")
    built = time.monotonic()
    if permit is not None:
        permit(needed_bytes(described))
    permitted = time.monotonic()
    sums = _GeneratedChecksums(described)
    stored = in_checkpoint(described)
    write(fmt, folder, plans(stored), partial(_summed_pieces, sums, seed), progress)
    if len(stored) < len(described):
        for name, checksums in buffer_checksums(builder, kwargs).items():
            sums.set(name, checksums)
    entries = tuple(one.entry(sums.of(one)) for one in described)
    manifest = Manifest(model, builder, f"seed {seed}", entries)
    manifest.write(folder / "manifest.json")
    seconds = {"build": built - started, "write": time.monotonic() - permitted}
    return Made(manifest, seconds)


def plans(stored: Iterable[Described]) -> list[TensorPlan]:
    """Return what to write of a model's tensors."""
    return [
        TensorPlan(one.name, tuple(one.tensor.shape), one.tensor.dtype, one.shared_with)
        for one in stored
    ]


def write(
    fmt: str,
    folder: Path,
    tensors: list[TensorPlan],
    pieces: Pieces,
    progress: Progress | None,
) -> None:
    """Write a checkpoint into ``folder``, where ``checkpoint_in`` finds it."""
    target = formats.checkpoint_in(folder, fmt)
    if formats.named(fmt).SUFFIX:
        target.parent.mkdir()
    formats.named(fmt).write(target, tensors, pieces, progress)


def parameter_pieces(seed: int, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values of a parameter: N(0, 0.02), and one more for the scales of norms.

    Every piece has a generator of its own. Pieces share memory: use each before the next.
    """
    numel, dtype = tensor.numel(), tensor.dtype
    if not dtype.is_floating_point:
        yield from pieces_of(torch.zeros(tensor.shape, dtype=dtype))
        return
    scale = tensor.ndim < 2 and name.rpartition(".")[2] in _SCALES
    buffer = torch.empty(min(numel, PIECE_ELEMENTS), dtype=torch.float32)
    for number, start in enumerate(range(0, numel, PIECE_ELEMENTS)):
        digest = sha256(f"{seed}/{number}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        piece = buffer[: numel - start]
        piece.normal_(1.0 if scale else 0.0, _STANDARD_DEVIATION, generator=generator)
        yield piece.to(dtype)


class _GeneratedChecksums:
    """The checksums of all tensors, filled by several threads."""

    def __init__(self, described: list[Described]) -> None:
        self.described = {one.name: one for one in described}
        self._sums: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def set(self, name: str, checksums: dict[str, str]) -> None:
        with self._lock:
            self._sums[name] = checksums

    def of(self, one: Described) -> dict[str, str]:
        return self._sums[one.shared_with or one.name]


def _summed_pieces(sums: _GeneratedChecksums, seed: int, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's values for the file, and leave their checksums in ``sums``."""
    one = sums.described[name]
    if one.kind == "parameter":
        pieces = parameter_pieces(seed, name, one.tensor)
    else:
        pieces = pieces_of(one.tensor)
    running = Checksums(one.tensor.numel(), one.tensor.dtype)
    yield from checksummed(pieces, running)
    sums.set(name, running.result())
