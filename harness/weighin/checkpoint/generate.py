"""List the tensors of a model without its weights, and generate a checkpoint for it from a seed.

The seed, the parameter's name and the element's position determine each value of a parameter;
buffers keep the constructor's values. This module runs in a subprocess, which needs memory for the
buffers and a few pieces of 16 MiB, or for the whole model if it has non-persistent buffers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import (
    CELL_DTYPES,
    PIECE_ELEMENTS,
    Checksums,
    checksum,
    checksummed,
    pieces_of,
)
from weighin.checkpoint.manifest import Kind, Manifest, TensorEntry
from weighin.construction.skeleton import (
    RealBuffers,
    build_skeleton,
    constructed_buffers,
    map_large_tensors,
    non_persistent_buffers,
    resolve_builder,
)
from weighin.construction.tensors import named_tensors
from weighin.errors import ConfigError
from weighin.formats.pretrained_folder import own_dtype
from weighin.stream import formats
from weighin.stream.slices import Pieces, Progress, TensorPlan, dtype_name
from weighin.stream.write import write as write_checkpoint

_STANDARD_DEVIATION: Final = 0.02
_SCALES: Final = frozenset({"weight", "scale", "gamma"})
RECORD_BYTES: Final = 4096  # an upper bound of a tensor's header and name in a file


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A tensor of a model. ``describe`` leaves the values of parameters, and of some buffers,
    uninitialised.

    ``is_kept`` tells whether the tensor keeps its own floating-point dtype, whatever dtype the
    model is built in.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind
    shared_with: str | None
    is_kept: bool = False

    def entry(self, checksums: dict[str, str], dtype: torch.dtype | None = None) -> TensorEntry:
        """Return the tensor's entry for a manifest. ``dtype`` is the tensor's dtype in the file;
        None means the same dtype as in the model.
        """
        kind = dtype or self.tensor.dtype
        return TensorEntry(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=dtype_name(kind),
            bytes=self.tensor.numel() * kind.itemsize,
            kind=self.kind,
            shared_with=self.shared_with,
            checksums=checksums,
        )


def describe(
    spec: ModelSpec, *, real_buffers: RealBuffers, dtype: torch.dtype | None = None
) -> list[Described]:
    """Return a model's tensors, built in ``dtype``: its state dict, then non-persistent buffers.

    Without ``dtype``, the model has the dtype of its published files; without files, float32.

    Raises:
        ConfigError: the builder is invalid, the model has no tensors or is lazy, or its state dict
            contains more than parameters and persistent buffers.
    """
    builder, dtype = spec.builder, dtype or getattr(torch, own_dtype(spec))
    build = resolve_builder(builder)
    model = build_skeleton(build, spec.kwargs, real_buffers=real_buffers, dtype=dtype)
    own = named_tensors(model)
    if lazy := [name for name, each in own.items() if torch.nn.parameter.is_lazy(each)]:
        raise ConfigError(
            f"builder {builder}: the shape of {lazy[0]!r} is not known yet, because its module is lazy",
            "run the model once in the builder, or give the lazy layers their sizes",
        )
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in own or value is not own[name]:
            raise ConfigError(
                f"builder {builder}: {name!r} in the state dict is neither a parameter nor a buffer",
                "name another builder: weighin cannot measure a model with state-dict hooks or"
                " extra state",
            )
    described = [*described_in(model)]
    if not described:
        raise ConfigError(
            f"builder {builder}: the model has no parameters and no buffers",
            "name a builder whose model has weights: --model package.module:callable",
        )
    if not getattr(model, "keeps_dtypes", False):
        return described
    return [
        replace(one, is_kept=one.tensor.is_floating_point() and one.tensor.dtype != dtype)
        for one in described
    ]


def described_in(model: torch.nn.Module) -> Iterator[Described]:
    """Yield the tensors of a model: its state dict in order, then its non-persistent buffers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True)
    tensors = dict(persistent)
    for name, (owner, leaf) in non_persistent_buffers(model):
        tensors[name] = owner._buffers[leaf]
    firsts: dict[int, str] = {}
    for name, tensor in tensors.items():
        kind: Kind = "persistent_buffer" if name in persistent else "non_persistent_buffer"
        if name in parameters:
            kind = "parameter"
        first = firsts.setdefault(id(tensor), name)
        yield Described(name, tensor.detach(), kind, None if first == name else first)


def in_checkpoint(described: list[Described]) -> list[Described]:
    return [tensor for tensor in described if tensor.kind != "non_persistent_buffer"]


def buffer_checksums(spec: ModelSpec) -> dict[str, dict[str, str]]:
    """Return the checksums that non-persistent buffers must have after a load, by name and dtype.

    Only the model's constructor computes the values of these buffers. ``buffer_checksums``
    therefore constructs the whole model for each dtype of ``CELL_DTYPES``, and needs the memory of
    one model.
    """
    build = resolve_builder(spec.builder)
    checksums: dict[str, dict[str, str]] = {}
    for wanted in CELL_DTYPES:
        for name, value in constructed_buffers(build, spec.kwargs, getattr(torch, wanted)).items():
            checksums.setdefault(name, {})[dtype_name(value.dtype)] = checksum(value)
    return checksums


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
    formats.suffix_of(fmt)  # raises for a format that is not written
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
    if formats.suffix_of(fmt):
        target.parent.mkdir()
    write_checkpoint(fmt, target, tensors, pieces, progress)


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
