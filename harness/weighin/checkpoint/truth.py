"""Find out what a correctly loaded model is: ``make`` generates a checkpoint from a seed, ``index``
compares a user's own checkpoint with the model, and both write a manifest with the checksums.

In a generated checkpoint, the seed, the parameter's name and the element's position determine each value
of a parameter; buffers keep the constructor's values. This module runs in a child, which needs memory for
the buffers and a few pieces of 16 MiB, or for the whole model if it has non-persistent buffers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Final

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import (
    CELL_DTYPES,
    PIECE_ELEMENTS,
    Checksums,
    checksum,
    pieces_of,
)
from weighin.checkpoint.manifest import Kind, Manifest, TensorEntry
from weighin.checkpoint.reader import RECORD_BYTES, checksum_of, read_pieces, widest_dtype
from weighin.errors import CheckpointError, ConfigError
from weighin.models.pretrained import written_after_load
from weighin.stream import formats
from weighin.stream import gguf_files as gguf
from weighin.stream.construct import (
    RealBuffers,
    build_skeleton,
    constructed_buffers,
    map_large_tensors,
    resolve_builder,
)
from weighin.stream.foreign import NOT_MEASURED, lacks, misfit, selecting
from weighin.stream.pretrained_folder import (
    BUILDER,
    is_pretrained_checkpoint,
    own_dtype,
    refuse_part,
)
from weighin.stream.pretrained_library import WHOLE, Selection, library_of, module_of
from weighin.stream.quantised import of_model, refuse_codes
from weighin.stream.slices import (
    Pieces,
    Progress,
    Slice,
    TensorPlan,
    check_converts,
    dtype_name,
)
from weighin.stream.tensors import named_tensors, non_persistent_buffers
from weighin.stream.write import run_parallel, write
from weighin.text import one_line, plain

Sums = dict[str, dict[str, str]]
"""The checksums of tensors, by name and dtype; several threads set one item each."""

_STANDARD_DEVIATION: Final = 0.02
_SCALES: Final = frozenset({"weight", "scale", "gamma"})


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A tensor of a model, of which some values are uninitialised. ``is_kept``: it keeps its own floating-point
    dtype, whatever dtype the model is built in.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind
    shared_with: str | None
    is_kept: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether a checkpoint of the model has the tensor."""
        return self.kind != "non_persistent_buffer"

    @property
    def plan(self) -> TensorPlan:
        shape = tuple(self.tensor.shape)
        return TensorPlan(self.name, shape, self.tensor.dtype, self.shared_with)

    def entry(self, checksums: dict[str, str], dtype: torch.dtype | None = None) -> TensorEntry:
        """Return the entry for a manifest; ``dtype`` is that in the file, if not the model's."""
        kind = dtype or self.tensor.dtype
        size = self.tensor.numel() * kind.itemsize
        shape, name = tuple(self.tensor.shape), dtype_name(kind)
        return TensorEntry(self.name, shape, name, size, self.kind, self.shared_with, checksums)


def describe(
    spec: ModelSpec, *, real_buffers: RealBuffers, dtype: torch.dtype | None = None
) -> list[Described]:
    """Return a model's tensors, built in ``dtype`` (by default that of its published files, or float32): its
    state dict, then non-persistent buffers.
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


def plans(described: Iterable[Described]) -> list[TensorPlan]:
    return [one.plan for one in described if one.is_stored]


def make(
    spec: ModelSpec,
    *,
    seed: int,
    fmt: str,
    folder: Path,
    permit: Callable[[int], None] = lambda _: None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a checkpoint and its ``manifest.json`` into ``folder``, which must be empty.

    The tensors have the dtype of the model's published files, or float32. ``permit`` is called with an upper
    bound of the bytes to write, before anything is written.
    """
    formats.suffix_of(fmt)  # raises for a format that is not written
    map_large_tensors()
    torch.set_num_threads(1)  # the format's writers run in several threads of their own
    described = describe(spec, real_buffers="all")
    stored = [one for one in described if one.is_stored]
    permit(sum(RECORD_BYTES + (0 if one.shared_with else one.tensor.nbytes) for one in stored))
    sums: Sums = {}
    by_name = {one.name: one for one in described}

    def pieces(name: str) -> Iterator[torch.Tensor]:
        one, tensor = by_name[name], by_name[name].tensor
        is_drawn = one.kind == "parameter"
        values = parameter_pieces(seed, name, tensor) if is_drawn else pieces_of(tensor)
        running = Checksums(tensor.numel(), tensor.dtype, is_kept=one.is_kept)
        return running.of(values, sums, name)

    _write(fmt, folder, plans(described), pieces, progress)
    sums |= _buffer_checksums(spec, described)
    entries = tuple(one.entry(sums[one.shared_with or one.name]) for one in described)
    return _written(folder, Manifest(spec.name, spec.builder, f"seed {seed}", entries))


def index(
    spec: ModelSpec,
    *,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str = "float32",
    selection: Selection = WHOLE,
    permit: Callable[[int], None] = lambda _: None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the manifest of a user's checkpoint into ``folder``, and convert the checkpoint if needed.

    Tensors are read piece by piece, but a Hugging Face folder is loaded in ``dtype`` by its own library. The
    checkpoint is converted if its format is not ``fmt``, it holds objects other than tensors, or
    ``selection`` is not ``WHOLE``. ``permit`` is called as by ``make``.
    """
    formats.known(fmt)
    map_large_tensors()
    if library_of(spec.builder) and is_pretrained_checkpoint(checkpoint):
        refuse_part(checkpoint, selection)
        return _index_folder(spec, checkpoint, fmt, folder, dtype, permit, progress)
    torch.set_num_threads(1)  # the readers run in several threads of their own
    slices = formats.read(checkpoint, selection)
    own = slices.format
    check_converts(checkpoint, slices, NOT_MEASURED)
    converts = own != fmt or bool(selection) or not slices.only_tensors
    places = {where.name: where for where in slices}
    described = describe(spec, real_buffers="non_persistent")
    refuse_codes(checkpoint, slices, [one.name for one in described])
    check_fits(checkpoint, spec.name, places, described)
    if converts and not slices:
        raise CheckpointError(
            f"{checkpoint}: holds no tensors, but the format {fmt} needs some",
            f"load the checkpoint in its own format: --format {own}",
        )
    permit(sum(RECORD_BYTES + one.nbytes for one in slices) if converts else 0)
    kept = {one.name for one in described if one.is_kept}
    sums: Sums = {}

    def pieces(name: str) -> Iterator[torch.Tensor]:
        place = places[name]
        running = Checksums(prod(place.shape), place.dtype, is_kept=name in kept)
        return running.of(read_pieces(place), sums, name)

    def complete(names: list[str]) -> None:
        """Compute the checksums of tied tensors that no writer has read; read them only once."""
        summed = next((name for name in names if name in sums), names[0])
        for piece in pieces(summed) if summed not in sums else ():
            if progress is not None and not converts:
                progress(piece.nbytes)
        for name in names:
            sums.setdefault(name, sums[summed])

    if converts:
        tensors = [replace(plan, dtype=places[plan.name].dtype) for plan in plans(described)]
        _write(fmt, folder, tensors, pieces, progress)
    groups: dict[object, list[str]] = {}
    for name, where in places.items():
        groups.setdefault(where.place, []).append(name)
    run_parallel(partial(complete, group) for group in groups.values())
    for one in described:
        if one.is_stored and one.shared_with and sums[one.name] != sums[one.shared_with]:
            raise CheckpointError(
                f"{checkpoint}: {one.name!r} and {one.shared_with!r} are one tensor in the model, "
                "but have different values in the file",
                "choose the model from which this checkpoint was saved",
            )
    sums |= _buffer_checksums(spec, described)
    entries = tuple(
        one.entry(sums[one.name], places[one.name].dtype if one.is_stored else None)
        for one in described
    )
    return _written(folder, Manifest(spec.name, spec.builder, str(checkpoint), entries))


def _index_folder(
    spec: ModelSpec,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str,
    permit: Callable[[int], None],
    progress: Progress | None,
) -> Manifest:
    """Write the manifest of a Hugging Face folder: the tensors that its library loads in ``dtype``.

    If the weights' format is not ``fmt``, write the state dict, too: in the widest dtype of the files, or
    in float32 for a GGUF file.
    """
    slices = formats.read(checkpoint)
    own = slices.format
    if (quantised := of_model(spec)) and own != fmt:
        raise CheckpointError(
            f"{checkpoint}: {quantised.summary}; from_pretrained reads these weights from the format"
            f" {own}, not from {fmt}",
            "leave --format out",
        )
    permit(sum(RECORD_BYTES + where.nbytes for where in slices) if own != fmt else 0)
    sums: Sums = {}
    if own != fmt:
        wide = torch.float32 if own == gguf.NAME else widest_dtype(slices)
        written = {one.name: one for one in described_in(_loaded(spec, checkpoint, wide))}

        def pieces(name: str) -> Iterator[torch.Tensor]:
            tensor = written[name].tensor
            return Checksums(tensor.numel(), tensor.dtype).of(pieces_of(tensor), sums, name)

        _write(fmt, folder, plans(written.values()), pieces, progress)
        written.clear()
    reference = _loaded(spec, checkpoint, getattr(torch, dtype))
    described = [*described_in(reference)]
    for one in described:
        kind = dtype_name(one.tensor.dtype)
        if one.shared_with is None:
            known = sums.get(one.name, {}).get(kind)
            sums[one.name] = {kind: known or checksum(one.tensor)}
            if progress is not None and own == fmt:
                progress(one.tensor.nbytes)
    of_file: Sums = {}
    if own == fmt and spec.builder == BUILDER and not quantised:
        places = {where.name: where for where in slices}
        for name in written_after_load(reference) & places.keys() & sums.keys():
            (kind,) = sums[name]
            in_file = {kind: checksum_of(places[name], dtype=getattr(torch, kind))}
            of_file |= {name: in_file} if in_file != sums[name] else {}
    entries = tuple(
        replace(one.entry(sums[first]), file_checksums=of_file.get(first))
        for one in described
        if (first := one.shared_with or one.name)
    )
    note = f"quantised with {quantised.method}" if quantised else _other_keys(slices, described)
    keys = "" if own == gguf.NAME else note
    return _written(folder, Manifest(spec.name, spec.builder, str(checkpoint), entries, keys))


def _loaded(spec: ModelSpec, checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    try:
        model, missing = module_of(spec.builder).reference(spec.kwargs, checkpoint, dtype)
    except ImportError as error:
        raise CheckpointError(
            f"{checkpoint}: from_pretrained fails: {one_line(str(error))}",
            "install the packages that from_pretrained names",
        ) from error
    if missing:
        raise lacks(checkpoint, missing, type(model).__name__)
    loaded: torch.nn.Module = model
    return loaded


def _other_keys(slices: Sequence[Slice], described: Sequence[Described]) -> str:
    """Count the keys in which the file and the model differ, as a text; empty for none."""
    stored = {where.name for where in slices}
    groups: dict[str, set[str]] = {}
    for one in described:
        if one.is_stored:
            groups.setdefault(one.shared_with or one.name, set()).add(one.name)
    left = len(stored.difference(*groups.values()))
    computed = 0 if left else sum(not names & stored for names in groups.values())
    counts = {"converted, renamed or left out": left, "computed": computed}
    return " and ".join(
        f"{count} {'key' if count == 1 else 'keys'} {what}"
        for what, count in counts.items()
        if count
    )


def check_fits(
    checkpoint: Path, model: str, places: Mapping[str, Slice], described: Sequence[Described]
) -> None:
    """Raise CheckpointError if the checkpoint's keys or shapes differ from those of the model."""
    wanted = {one.name: tuple(one.tensor.shape) for one in described if one.is_stored}
    problems = {
        "missing": [plain(name) for name in wanted if name not in places],
        "unexpected": [plain(name) for name in places if name not in wanted],
        "of another shape": [
            f"{plain(name)} is {places[name].shape}, not {shape}"
            for name, shape in wanted.items()
            if name in places and places[name].shape != shape
        ],
    }
    if any(problems.values()):
        shapes = {name: where.shape for name, where in places.items()}
        repair = selecting(shapes, wanted)
        raise misfit(checkpoint, f"model {model}", problems, repair=repair)


def _buffer_checksums(spec: ModelSpec, described: Sequence[Described]) -> Sums:
    """Return the checksums of non-persistent buffers after a load, by name and dtype.

    Only the constructor computes their values, so that the whole model is constructed for each dtype.
    """
    build = resolve_builder(spec.builder)
    sums: Sums = {}
    for wanted in () if all(one.is_stored for one in described) else CELL_DTYPES:
        for name, value in constructed_buffers(build, spec.kwargs, getattr(torch, wanted)).items():
            sums.setdefault(name, {})[dtype_name(value.dtype)] = checksum(value)
    return sums


def _write(
    fmt: str, folder: Path, tensors: list[TensorPlan], pieces: Pieces, progress: Progress | None
) -> None:
    target = formats.checkpoint_in(folder, fmt)
    if formats.suffix_of(fmt):
        target.parent.mkdir()
    write(fmt, target, tensors, pieces, progress)


def _written(folder: Path, manifest: Manifest) -> Manifest:
    manifest.write(folder / "manifest.json")
    return manifest


def parameter_pieces(seed: int, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a parameter's values, from a normal distribution with standard deviation 0.02 and mean 0, or 1 for
    the scales of normalisation layers; uint8 is uniform, and other integers are 0.

    Every piece has its own random generator. The next piece may overwrite the previous one.
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
        digest = sha256(f"{seed}/{number}/{name}".encode()).digest()
        own_seed = int.from_bytes(digest[:8], "little") >> 1
        piece, generator = buffer[: numel - start], torch.Generator().manual_seed(own_seed)
        if are_bytes:
            yield piece.random_(generator=generator)
        else:
            yield piece.normal_(mean, _STANDARD_DEVIATION, generator=generator).to(dtype)
