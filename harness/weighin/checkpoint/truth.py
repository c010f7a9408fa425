"""Find out what a correctly loaded model is: ``make`` generates a checkpoint from a seed, ``index``
compares a user's own checkpoint with the model, and both write a manifest with the checksums.

In a generated checkpoint, the seed, the parameter's name and the element's position determine each value
of a parameter; buffers keep the constructor's values. This module runs in a child, which needs memory for
the buffers and a few pieces of 16 MiB, or for the whole model if it has non-persistent buffers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Sums,
    checksum,
    pieces_of,
    summing,
)
from weighin.checkpoint.manifest import Kind, Manifest, TensorEntry
from weighin.checkpoint.reader import RECORD_BYTES, checksum_of, read_pieces, widest_dtype
from weighin.errors import CheckpointError, ConfigError
from weighin.models.pretrained import written_after_load
from weighin.stream import construct, formats, pretrained_folder
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import NOT_MEASURED, lacks, misfit, selecting
from weighin.stream.pretrained_library import WHOLE, Selection, library_of, module_of
from weighin.stream.quantised import of_model, refuse_codes
from weighin.stream.slices import Progress, Slice, TensorPlan, check_converts, dtype_name
from weighin.stream.tensors import named_tensors, non_persistent_buffers
from weighin.stream.write import run_parallel, write
from weighin.text import one_line, plain

Permit = Callable[[int, int], None]
"""Called before anything is written with upper bounds of the bytes to write, and of those only to read."""

_STANDARD_DEVIATION: Final = 0.02
_SCALES: Final = frozenset({"weight", "scale", "gamma"})


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A model's tensor; of equal values, ``place`` is equal. No load converts one that ``is_kept``."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    shared_with: str | None
    dtype: torch.dtype
    place: object
    is_kept: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether a checkpoint of the model has the tensor."""
        return self.kind != "non_persistent_buffer"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def entry(self, checksums: dict[str, str]) -> TensorEntry:
        size, name = self.tensor.numel() * self.dtype.itemsize, dtype_name(self.dtype)
        return TensorEntry(
            self.name, self.shape, name, size, self.kind, self.shared_with, checksums
        )


def describe(spec: ModelSpec, dtype: torch.dtype | None = None) -> dict[str, Described]:
    """Return the state dict's tensors, then the other buffers, built in ``dtype`` or as published."""
    builder, dtype = spec.builder, dtype or getattr(torch, pretrained_folder.own_dtype(spec))
    build = construct.resolve_builder(builder)
    model = construct.build_skeleton(build, spec.kwargs, dtype=dtype)
    own = named_tensors(model)
    if lazy := [name for name, each in own.items() if torch.nn.parameter.is_lazy(each)]:
        raise ConfigError(
            f"builder {builder}: the shape of {lazy[0]!r} is not known yet, because its module is lazy",
            "run the model once in the builder, or give the lazy layers their sizes",
        )
    for name, value in model.state_dict(keep_vars=True).items():
        if value is not own.get(name):
            raise ConfigError(
                f"builder {builder}: {name!r} in the state dict is neither a parameter nor a buffer",
                "name another builder: weighin cannot measure a model with state-dict hooks or"
                " extra state",
            )
    if not own:
        raise ConfigError(
            f"builder {builder}: the model has no parameters and no buffers",
            "name a builder whose model has weights: --model package.module:callable",
        )
    return _described(model, dtype if getattr(model, "keeps_dtypes", False) else None)


def _described(model: torch.nn.Module, usual: torch.dtype | None = None) -> dict[str, Described]:
    """Return the tensors of a model; those of another floating-point dtype than ``usual`` are kept."""
    kinds: dict[str, Kind] = {}
    kinds |= dict.fromkeys(dict(model.named_parameters(remove_duplicate=False)), "parameter")
    tensors = model.state_dict(keep_vars=True)
    for name, (owner, leaf) in non_persistent_buffers(model):
        tensors[name], kinds[name] = owner._buffers[leaf], "non_persistent_buffer"
    firsts: dict[int, str] = {}
    described = {}
    for name, tensor in tensors.items():
        kind, dtype = kinds.get(name, "persistent_buffer"), tensor.dtype
        first = firsts.setdefault(id(tensor), name)
        shared_with = None if first == name else first
        is_kept = usual is not None and dtype.is_floating_point and dtype != usual
        described[name] = Described(name, tensor.detach(), kind, shared_with, dtype, first, is_kept)
    return described


def plans(described: Mapping[str, Described]) -> list[TensorPlan]:
    return [
        TensorPlan(one.name, one.shape, one.dtype, one.shared_with)
        for one in described.values()
        if one.is_stored
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Truth:
    """The tensors of a model by name; ``sums`` gets the checksums of the ``values`` that are read."""

    spec: ModelSpec
    described: Mapping[str, Described]
    values: Callable[[Described], Iterator[torch.Tensor]]
    sums: Sums

    def write(self, folder: Path, fmt: str, progress: Progress | None) -> None:
        target = formats.checkpoint_in(folder, fmt)
        target.parent.mkdir(exist_ok=True)
        write(fmt, target, plans(self.described), self._pieces, progress)

    def manifest(
        self,
        source: str,
        folder: Path,
        keys: str = "",
        in_file: Sums | None = None,
        progress: Progress | None = None,
    ) -> Manifest:
        """Read the tensors that were not written, and write the manifest."""
        by_place: dict[object, list[str]] = {}
        for one in self.described.values():
            by_place.setdefault(one.place, []).append(one.name)
        run_parallel(partial(self._read, names, progress) for names in by_place.values())
        entries = []
        for one in self.described.values():
            first, sums = one.shared_with or one.name, self.sums[one.name]
            if one.is_stored and sums != self.sums[first]:
                raise CheckpointError(
                    f"{source}: {one.name!r} and {first!r} are one tensor in the model, but have"
                    " different values in the file",
                    "choose the model from which this checkpoint was saved",
                )
            read = (in_file or {}).get(first)
            entries.append(replace(one.entry(sums), file_checksums=None if read == sums else read))
        manifest = Manifest(self.spec.name, self.spec.builder, source, tuple(entries), keys)
        manifest.write(folder / "manifest.json")
        return manifest

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        one = self.described[name]
        numel = one.tensor.numel()
        return summing(name, self.values(one), numel, one.dtype, self.sums, is_kept=one.is_kept)

    def _read(self, names: list[str], progress: Progress | None) -> None:
        """Read the values of tied tensors, unless they were read under one of their names."""
        known = next((name for name in names if name in self.sums), names[0])
        for piece in self._pieces(known) if known not in self.sums else ():
            if progress is not None:
                progress(piece.nbytes)
        for name in names:
            self.sums.setdefault(name, self.sums[known])


def make(
    spec: ModelSpec,
    *,
    seed: int,
    fmt: str,
    folder: Path,
    permit: Permit = lambda _to_write, _to_read: None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a checkpoint, in the model's published dtype, and its manifest into an empty folder."""
    formats.suffix_of(fmt)  # raises for a format that is not written
    construct.map_large_tensors()
    torch.set_num_threads(1)  # the format's writers run in several threads of their own
    described = describe(spec)
    tensors = plans(described)
    permit(sum(RECORD_BYTES + (0 if one.shared_with else one.nbytes) for one in tensors), 0)

    def values(one: Described) -> Iterator[torch.Tensor]:
        is_drawn = one.kind == "parameter"
        return parameter_pieces(seed, one.name, one.tensor) if is_drawn else pieces_of(one.tensor)

    truth = _Truth(spec, described, values, _buffer_sums(spec, described))
    truth.write(folder, fmt, progress)
    return truth.manifest(f"seed {seed}", folder)


def index(
    spec: ModelSpec,
    *,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str = "float32",
    selection: Selection = WHOLE,
    permit: Permit = lambda _to_write, _to_read: None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the manifest of a user's checkpoint into ``folder``, and convert the checkpoint into ``fmt``, if
    it has another format, or the selected tensors are not all that it holds.

    Tensors are read piece by piece, but a Hugging Face folder is loaded in ``dtype`` by its own library.
    """
    formats.known(fmt)
    construct.map_large_tensors()
    if library_of(spec.builder) and pretrained_folder.is_pretrained_checkpoint(checkpoint):
        pretrained_folder.refuse_part(checkpoint, selection)
        return _index_folder(spec, checkpoint, fmt, folder, dtype, permit, progress)
    torch.set_num_threads(1)  # the readers run in several threads of their own
    slices = formats.read(checkpoint, selection)
    check_converts(checkpoint, slices, NOT_MEASURED)
    converts = slices.format != fmt or bool(selection) or not slices.only_tensors
    described = describe(spec)
    refuse_codes(checkpoint, slices, [*described])
    places = {where.name: where for where in slices}
    _check_fits(checkpoint, spec.name, places, described)
    if converts:
        permit(sum(RECORD_BYTES + one.nbytes for one in slices), 0)
    else:
        permit(0, sum({one.place: one.nbytes for one in slices}.values()))
    for name, place in places.items():
        described[name] = replace(described[name], dtype=place.dtype, place=place.place)
    sums = _buffer_sums(spec, described)
    truth = _Truth(spec, described, lambda one: read_pieces(places[one.name]), sums)
    if converts:
        truth.write(folder, fmt, progress)
    return truth.manifest(str(checkpoint), folder, progress=None if converts else progress)


def _index_folder(
    spec: ModelSpec,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str,
    permit: Permit,
    progress: Progress | None,
) -> Manifest:
    """Write the manifest of what a folder's library loads in ``dtype``, and the state dict as ``fmt``."""
    slices = formats.read(checkpoint)
    is_gguf, in_place, quantised = slices.format == gguf.NAME, slices.format == fmt, of_model(spec)
    if quantised and not in_place:
        raise CheckpointError(
            f"{checkpoint}: {quantised.summary}; from_pretrained reads these weights from the format"
            f" {slices.format}, not from {fmt}",
            "leave --format out",
        )
    sums: Sums = {}

    def values(one: Described) -> Iterator[torch.Tensor]:
        return pieces_of(one.tensor)

    if not in_place:
        permit(sum(RECORD_BYTES + where.nbytes for where in slices), 0)
        wide = torch.float32 if is_gguf else widest_dtype(slices)
        whole = _Truth(spec, _described(loaded(spec, checkpoint, wide)), values, sums)
        whole.write(folder, fmt, progress)
        del whole
    model = loaded(spec, checkpoint, getattr(torch, dtype))
    described = _described(model)
    if in_place:
        permit(0, sum(one.tensor.nbytes for one in described.values() if not one.shared_with))
    in_file: Sums = {}
    for name, one in described.items():
        kind, known = dtype_name(one.dtype), sums.pop(name, {})
        described[name] = replace(one, is_kept=True)  # its checksum is of this dtype alone
        sums |= {name: {kind: known[kind]}} if kind in known else {}
    if in_place and spec.builder == pretrained_folder.BUILDER and not quantised:
        places = {where.name: where for where in slices}
        for name in written_after_load(model) & places.keys() & described.keys():
            one = described[name]
            in_file[name] = {dtype_name(one.dtype): checksum_of(places[name], dtype=one.dtype)}
    note = f"quantised with {quantised.method}" if quantised else _other_keys(slices, described)
    truth = _Truth(spec, described, values, sums)
    shown = progress if in_place else None
    return truth.manifest(str(checkpoint), folder, "" if is_gguf else note, in_file, shown)


def loaded(spec: ModelSpec, checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model that its library loads; CheckpointError if it fails, or finds weights missing."""
    model: torch.nn.Module
    try:
        model, missing = module_of(spec.builder).reference(spec.kwargs, checkpoint, dtype)
    except ImportError as error:
        raise CheckpointError(
            f"{checkpoint}: from_pretrained fails: {one_line(str(error))}",
            "install the packages that from_pretrained names",
        ) from error
    if missing:
        raise lacks(checkpoint, missing, type(model).__name__)
    return model


def _buffer_sums(spec: ModelSpec, described: Mapping[str, Described]) -> Sums:
    """Return the checksums of non-persistent buffers, which the constructor alone computes, by dtype."""
    sums: Sums = {}
    for wanted in () if all(one.is_stored for one in described.values()) else CELL_DTYPES:
        build, dtype = construct.resolve_builder(spec.builder), getattr(torch, wanted)
        for name, value in construct.constructed_buffers(build, spec.kwargs, dtype).items():
            sums.setdefault(name, {})[dtype_name(value.dtype)] = checksum(value)
    return sums


def _other_keys(slices: Sequence[Slice], described: Mapping[str, Described]) -> str:
    """Count the keys in which the file and the model differ, as a text; empty for none."""
    stored = {where.name for where in slices}
    groups: dict[str, set[str]] = {}
    for one in described.values():
        if one.is_stored:
            groups.setdefault(one.shared_with or one.name, set()).add(one.name)
    left = len(stored.difference(*groups.values()))
    computed = sum(not names & stored for names in groups.values())
    what = "converted, renamed or left out" if left else "computed"
    count = left or computed
    return f"{count} key{'s' * (count > 1)} {what}" if count else ""


def _check_fits(
    checkpoint: Path, model: str, places: Mapping[str, Slice], described: Mapping[str, Described]
) -> None:
    """Raise CheckpointError if the checkpoint's keys or shapes differ from those of the model."""
    wanted = {name: one.shape for name, one in described.items() if one.is_stored}
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
        repair = selecting({name: where.shape for name, where in places.items()}, wanted)
        raise misfit(checkpoint, f"model {model}", problems, repair=repair)


def parameter_pieces(seed: int, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a parameter's values, from a normal distribution with standard deviation 0.02 and mean 0, or 1 for
    the scales of normalisation layers; uint8 is uniform, and other integers are 0. The next piece may
    overwrite the previous one.
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
