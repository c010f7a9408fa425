"""Generate a checkpoint for a model from a seed.

The seed, the parameter's name and the element's position determine each value of a parameter;
buffers keep the constructor's values. This module runs in a subprocess, which needs memory for the
buffers and a few pieces of 16 MiB, or for the whole model if it has non-persistent buffers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch

from weighin import formats
from weighin.cell import ModelSpec
from weighin.checkpoint.describe import Described, buffer_checksums, describe, in_checkpoint
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.piecewise import PIECE_ELEMENTS, Checksums, checksummed, pieces_of
from weighin.construction.skeleton import map_large_tensors
from weighin.formats.base import Pieces, Progress, TensorPlan

_STANDARD_DEVIATION: Final = 0.02
_SCALES: Final = frozenset({"weight", "scale", "gamma"})
RECORD_BYTES: Final = 4096  # an upper bound of a tensor's header and name in a file


@dataclass(frozen=True, slots=True)
class Made:
    """The manifest of a generated or indexed checkpoint, and the seconds of each stage."""

    manifest: Manifest
    seconds: dict[str, float]


def make(
    spec: ModelSpec,
    *,
    seed: int,
    fmt: str,
    folder: Path,
    permit: Callable[[int], None] = lambda _: None,
    progress: Progress | None = None,
) -> Made:
    """Write a checkpoint and its ``manifest.json`` into ``folder``, which must be empty.

    The tensors have the dtype of the model's published files, or float32 without such files.
    ``make`` calls ``permit`` with an upper bound of the bytes to write, before it writes anything.

    Raises:
        ConfigError: for the same reasons as ``describe``.
    """
    formats.named(fmt)
    map_large_tensors()
    torch.set_num_threads(1)  # the format's writers run in several threads of their own
    started = time.monotonic()
    described = describe(spec, real_buffers="all")
    built = time.monotonic()
    stored = in_checkpoint(described)
    permit(sum(RECORD_BYTES + (0 if one.shared_with else one.tensor.nbytes) for one in stored))
    permitted = time.monotonic()
    sums: dict[str, dict[str, str]] = {}
    by_name = {tensor.name: tensor for tensor in described}
    write(fmt, folder, plans(stored), partial(_summed_pieces, sums, by_name, seed), progress)
    if len(stored) < len(described):
        sums |= buffer_checksums(spec)
    entries = tuple(tensor.entry(sums[tensor.shared_with or tensor.name]) for tensor in described)
    manifest = Manifest(spec.name, spec.builder, f"seed {seed}", entries)
    manifest.write(folder / "manifest.json")
    seconds = {"build": built - started, "write": time.monotonic() - permitted}
    return Made(manifest, seconds)


def plans(stored: Iterable[Described]) -> list[TensorPlan]:
    return [
        TensorPlan(each.name, tuple(each.tensor.shape), each.tensor.dtype, each.shared_with)
        for each in stored
    ]


def write(
    fmt: str,
    folder: Path,
    tensors: list[TensorPlan],
    pieces: Pieces,
    progress: Progress | None,
) -> None:
    """Write a checkpoint into ``folder``, at the path that ``formats.checkpoint_in`` returns."""
    target = formats.checkpoint_in(folder, fmt)
    if formats.named(fmt).SUFFIX:
        target.parent.mkdir()
    formats.named(fmt).write(target, tensors, pieces, progress)


def parameter_pieces(seed: int, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a parameter's values, from a normal distribution with standard deviation 0.02.

    The mean is 1 for the scales of normalisation layers, and 0 for all other parameters. The values
    of a uint8 parameter are uniformly distributed. Parameters of other integer dtypes are 0.

    Every piece has its own random generator. The next piece may overwrite the previous one, so
    finish with each piece before you take the next.
    """
    numel, dtype = tensor.numel(), tensor.dtype
    are_bytes = dtype == torch.uint8  # such as the blocks of a quantised matrix
    if not (are_bytes or dtype.is_floating_point):
        yield from pieces_of(torch.zeros(tensor.shape, dtype=dtype))
        return
    mean = 1.0 if tensor.ndim < 2 and name.rpartition(".")[2] in _SCALES else 0.0
    kind = torch.uint8 if are_bytes else torch.float32
    buffer = torch.empty(min(numel, PIECE_ELEMENTS), dtype=kind)
    for number, start in enumerate(range(0, numel, PIECE_ELEMENTS)):
        piece, generator = buffer[: numel - start], _generator(seed, number, name)
        if are_bytes:
            yield piece.random_(generator=generator)
        else:
            yield piece.normal_(mean, _STANDARD_DEVIATION, generator=generator).to(dtype)


def _generator(seed: int, number: int, name: str) -> torch.Generator:
    digest = sha256(f"{seed}/{number}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _summed_pieces(
    sums: dict[str, dict[str, str]], by_name: Mapping[str, Described], seed: int, name: str
) -> Iterator[torch.Tensor]:
    """Yield the values to write for a tensor, and then put their checksums into ``sums``."""
    described, tensor = by_name[name], by_name[name].tensor
    running = Checksums(tensor.numel(), tensor.dtype, is_kept=described.is_kept)
    is_drawn = described.kind == "parameter"
    pieces = parameter_pieces(seed, name, tensor) if is_drawn else pieces_of(tensor)
    return checksummed(pieces, running, sums, name)
