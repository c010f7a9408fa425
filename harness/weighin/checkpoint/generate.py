"""Find out what a correctly loaded model is: ``make`` generates a checkpoint from a seed, ``index``
compares a user's own checkpoint with the model, and both write a manifest with the checksums.

This module runs in a child, which needs memory for the buffers, a few pieces of 16 MiB and the largest tensor
in several parts or computed, or for the whole model if it has non-persistent buffers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint import reader
from weighin.checkpoint.checksum import (
    CELL_DTYPES,
    PIECE_ELEMENTS,
    Sums,
    checksum,
    pieces_of,
    summing,
)
from weighin.checkpoint.manifest import Kind, Manifest, TensorEntry
from weighin.errors import CheckpointError, ConfigError
from weighin.models.pretrained import written_after_load
from weighin.stream import construct, formats, hugging_face_folder
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import NOT_MEASURED, lacks, misfit, selecting
from weighin.stream.pretrained_library import WHOLE, Selection, library_of, module_of
from weighin.stream.quantised import of_model, refuse_codes
from weighin.stream.slices import Slice, TensorPlan, check_converts, dtype_name
from weighin.stream.tensors import named_tensors, non_persistent_buffers
from weighin.stream.write import run_parallel, write
from weighin.text import plain

_SCALES: Final = frozenset({"weight", "scale", "gamma"})


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A tensor of a model. Tied tensors have an equal ``place``; no load converts a tensor that ``is_kept``."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    shared_with: str | None
    dtype: torch.dtype
    place: object
    read: Callable[[], Iterator[torch.Tensor]]  # the elements in order, in pieces
    is_kept: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether a checkpoint of the model has the tensor."""
        return self.kind != "non_persistent_buffer"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def pieces(self, sums: Sums) -> Iterator[torch.Tensor]:
        """Read the elements; ``sums`` then gets their checksums."""
        numel = self.tensor.numel()
        return summing(self.name, self.read(), numel, self.dtype, sums, is_kept=self.is_kept)

    def entry(self, sums: dict[str, str], in_file: dict[str, str] | None = None) -> TensorEntry:
        size, dtype = self.tensor.numel() * self.dtype.itemsize, dtype_name(self.dtype)
        shared, others = self.shared_with, None if in_file == sums else in_file
        return TensorEntry(self.name, self.shape, dtype, size, self.kind, shared, sums, others)


def describe(spec: ModelSpec, dtype: torch.dtype | None = None) -> dict[str, Described]:
    """Return the state dict's tensors, then the other buffers, built in ``dtype`` or as published."""
    builder, dtype = spec.builder, dtype or getattr(torch, hugging_face_folder.own_dtype(spec))
    model = construct.build_skeleton(construct.resolve_builder(builder), spec.kwargs, dtype=dtype)
    own = named_tensors(model)
    for name, value in {**own, **model.state_dict(keep_vars=True)}.items():
        if torch.nn.parameter.is_lazy(value) or value is not own.get(name):
            raise ConfigError(
                f"builder {builder}: {name!r} is neither a parameter nor a buffer of a known shape",
                "choose a builder whose model has no state-dict hooks and no extra state; if it has lazy"
                " modules, run the model once in the builder",
            )
    if not own:
        raise ConfigError(
            f"builder {builder}: the model has no parameters and no buffers",
            "choose a builder whose model has weights: --model package.module:callable",
        )
    return describe_model(model, dtype if getattr(model, "keeps_dtypes", False) else None)


def describe_model(
    model: torch.nn.Module, usual: torch.dtype | None = None
) -> dict[str, Described]:
    """Return the tensors of a model; those of another floating-point dtype than ``usual`` are kept."""
    kinds: dict[str, Kind] = {}
    kinds |= dict.fromkeys(dict(model.named_parameters(remove_duplicate=False)), "parameter")
    tensors = model.state_dict(keep_vars=True)
    for name, (owner, leaf) in non_persistent_buffers(model):
        tensors[name], kinds[name] = owner._buffers[leaf], "non_persistent_buffer"
    firsts: dict[int, str] = {}
    described = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):  # an extra state
            continue
        kind, dtype = kinds.get(name, "persistent_buffer"), tensor.dtype
        first = firsts.setdefault(id(tensor), name)
        shared_with, read = None if first == name else first, partial(pieces_of, tensor)
        is_kept = usual is not None and dtype.is_floating_point and dtype != usual
        described[name] = Described(
            name, tensor.detach(), kind, shared_with, dtype, first, read, is_kept
        )
    return described


def plans(described: Mapping[str, Described]) -> list[TensorPlan]:
    return [
        TensorPlan(one.name, one.shape, one.dtype, one.shared_with)
        for one in described.values()
        if one.is_stored
    ]


def _write_tensors(fmt: str, folder: Path, described: Mapping[str, Described], sums: Sums) -> None:
    target = formats.checkpoint_in(folder, fmt)
    target.parent.mkdir(exist_ok=True)
    write(fmt, target, plans(described), lambda name: described[name].pieces(sums))


def _write_manifest(
    spec: ModelSpec,
    source: str,
    folder: Path,
    described: Mapping[str, Described],
    sums: Sums,
    keys: str = "",
    in_file: Mapping[str, dict[str, str]] = MappingProxyType({}),
) -> Manifest:
    """Read the tensors that ``sums`` lacks, and write the manifest; ``in_file`` as ``file_checksums``."""

    def read(tied: list[Described]) -> None:
        known = next((one for one in tied if one.name in sums), tied[0])
        if known.name not in sums:
            for _ in known.pieces(sums):
                pass
        for one in tied:
            sums.setdefault(one.name, sums[known.name])

    by_place: dict[object, list[Described]] = {}
    for one in described.values():
        by_place.setdefault(one.place, []).append(one)
    run_parallel(partial(read, tied) for tied in by_place.values())
    entries = []
    for one in described.values():
        first = one.shared_with or one.name
        if one.is_stored and sums[one.name] != sums[first]:
            raise CheckpointError(
                f"{source}: {one.name!r} and {first!r} are one tensor in the model, but have"
                " different values in the file",
                "choose the model from which the checkpoint was saved",
            )
        entries.append(one.entry(sums[one.name], in_file.get(first)))
    manifest = Manifest(spec.name, spec.builder, source, tuple(entries), keys)
    manifest.write(folder / "manifest.json")
    return manifest


def make(
    spec: ModelSpec,
    *,
    seed: int,
    fmt: str,
    folder: Path,
    permit: Callable[[int, int], None] = lambda _to_write, _to_read: None,
) -> Manifest:
    """Write a checkpoint, in the model's published dtype, and its manifest into an empty folder.

    Before, ``permit`` gets upper bounds of the bytes to write and of those to read.
    """
    formats.suffix_of(fmt)  # raises for a format that is not written
    construct.map_large_tensors()
    torch.set_num_threads(1)  # the format's writers run in several threads of their own
    described = describe(spec)
    stored = [0 if one.shared_with else one.nbytes for one in plans(described)]
    permit(len(stored) * reader.RECORD_BYTES + sum(stored), 0)
    for name, one in described.items():
        if one.kind == "parameter":
            described[name] = replace(one, read=partial(parameter_pieces, seed, name, one.tensor))
    sums = _buffer_sums(spec, described)
    _write_tensors(fmt, folder, described, sums)
    return _write_manifest(spec, f"seed {seed}", folder, described, sums)


def index(
    spec: ModelSpec,
    *,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str = "float32",
    selection: Selection = WHOLE,
    permit: Callable[[int, int], None] = lambda _to_write, _to_read: None,
) -> Manifest:
    """Write the manifest of a user's checkpoint, and the checkpoint as ``fmt`` unless it can be loaded as it is.

    Tensors are read piece by piece, but a Hugging Face folder is loaded in ``dtype`` by its own library.
    """
    formats.known(fmt)
    construct.map_large_tensors()
    if library_of(spec.builder) and hugging_face_folder.is_pretrained_checkpoint(checkpoint):
        hugging_face_folder.refuse_part(checkpoint, selection)
        return _index_folder(spec, checkpoint, fmt, folder, dtype, permit)
    torch.set_num_threads(1)  # the readers run in several threads of their own
    slices = formats.read(checkpoint, selection)
    check_converts(checkpoint, slices, NOT_MEASURED)
    converts = slices.format != fmt or bool(selection) or not slices.only_tensors
    described = describe(spec)
    refuse_codes(checkpoint, slices, lambda: described)
    places = {where.name: where for where in slices}
    _check_fits(checkpoint, spec.name, places, described)
    to_write = sum(reader.RECORD_BYTES + one.nbytes for one in slices) if converts else 0
    permit(to_write, reader.bytes_to_read(slices))
    for name, place in places.items():
        read = partial(reader.read_pieces, place)
        described[name] = replace(described[name], dtype=place.dtype, place=place.place, read=read)
    sums = _buffer_sums(spec, described)
    if converts:
        _write_tensors(fmt, folder, described, sums)
    return _write_manifest(spec, str(checkpoint), folder, described, sums)


def _index_folder(
    spec: ModelSpec,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str,
    permit: Callable[[int, int], None],
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
    if not in_place:
        # The library maps the files, which the kernel counts as no reads.
        permit(sum(reader.RECORD_BYTES + where.nbytes for where in slices), 0)
        wide = torch.float32 if is_gguf else reader.widest_dtype(slices)
        whole = describe_model(loaded(spec, checkpoint, wide))
        _write_tensors(fmt, folder, whole, sums)
        del whole  # before the next load
    model = loaded(spec, checkpoint, getattr(torch, dtype))
    described = describe_model(model)
    in_file: Sums = {}
    for name, one in described.items():
        kind, known = dtype_name(one.dtype), sums.pop(name, {})
        described[name] = replace(one, is_kept=True)  # its checksum is of this dtype alone
        sums |= {name: {kind: known[kind]}} if kind in known else {}
    if in_place and spec.builder == hugging_face_folder.BUILDER and not quantised:
        places = {where.name: where for where in slices}
        for name in written_after_load(model) & places.keys() & described.keys():
            kept = described[name].dtype
            in_file[name] = {dtype_name(kept): reader.checksum_of(places[name], kept)}
    stored = {where.name for where in slices}
    firsts = {n: one.shared_with or n for n, one in described.items() if one.is_stored}
    are_same = stored <= firsts.keys() and {firsts[n] for n in stored} == {*firsts.values()}
    keys = "" if are_same else "keys converted, renamed, computed or left out"
    keys = f"quantised with {quantised.method}" if quantised else keys
    return _write_manifest(
        spec, str(checkpoint), folder, described, sums, "" if is_gguf else keys, in_file
    )


def loaded(spec: ModelSpec, checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model that its library loads; CheckpointError if it fails, or finds weights missing."""
    model: torch.nn.Module
    model, missing = module_of(spec.builder).reference(spec.kwargs, checkpoint, dtype)
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
        raise misfit(checkpoint, f"model {model}", problems, repair=selecting(places, wanted))


def parameter_pieces(seed: int, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a parameter's values, normal with mean 0, or 1 for the scales of normalisation layers; uint8 is
    uniform, and other integers are 0. The next piece may overwrite the previous one.
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
            yield piece.normal_(mean, 0.02, generator=generator).to(dtype)
