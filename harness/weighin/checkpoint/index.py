"""Compare a user's own checkpoint with a model, and write the checkpoint's manifest."""

import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import Checksums, checksum, checksummed, pieces_of
from weighin.checkpoint.generate import (
    RECORD_BYTES,
    Described,
    Made,
    buffer_checksums,
    describe,
    described_in,
    in_checkpoint,
    plans,
    write,
)
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.reader import read_into, read_pieces, widest_dtype
from weighin.construction.skeleton import map_large_tensors
from weighin.errors import CheckpointError
from weighin.formats.pretrained_folder import BUILDER, is_pretrained_checkpoint, refuse_part
from weighin.formats.pretrained_library import WHOLE, Selection, library_of, module_of
from weighin.formats.quantised import of_model, refuse_codes
from weighin.models.pretrained import written_after_load
from weighin.stream import formats
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import NOT_MEASURED, lacks, misfit, selecting
from weighin.stream.slices import Progress, Slices, TensorSlice, check_converts, dtype_name
from weighin.stream.write import run_parallel
from weighin.text import one_line, plain


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
) -> Made:
    """Write the manifest of a user's checkpoint into ``folder``, and convert the checkpoint if needed.

    ``index`` reads tensors piece by piece, but loads a Hugging Face folder in ``dtype`` by the folder's
    own library. ``index`` converts the checkpoint if its format is not ``fmt``, if it holds objects
    other than tensors, or if ``selection`` is not ``WHOLE``. ``index`` calls ``permit`` with an upper
    bound of the bytes to write.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the model.
    """
    formats.known(fmt)
    map_large_tensors()
    if library_of(spec.builder) and is_pretrained_checkpoint(checkpoint):
        refuse_part(checkpoint, selection)
        return _index_folder(spec, checkpoint, fmt, folder, dtype, permit, progress)
    torch.set_num_threads(1)  # the readers run in several threads of their own
    started = time.monotonic()
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
    sums = _IndexedChecksums(places, kept)
    read = time.monotonic()
    if converts:
        stored = in_checkpoint(described)
        tensors = [replace(plan, dtype=places[plan.name].dtype) for plan in plans(stored)]
        write(fmt, folder, tensors, sums.pieces, progress)
    sums.complete(None if converts else progress)
    _check_ties(checkpoint, sums.by_name, described)
    if len(in_checkpoint(described)) < len(described):
        sums.by_name |= buffer_checksums(spec)
    entries = tuple(
        tensor.entry(
            sums.by_name[tensor.name],
            places[tensor.name].dtype if tensor.kind != "non_persistent_buffer" else None,
        )
        for tensor in described
    )
    manifest = Manifest(spec.name, spec.builder, str(checkpoint), entries)
    manifest.write(folder / "manifest.json")
    return Made(manifest, {"read": read - started, "convert": time.monotonic() - read})


def _index_folder(
    spec: ModelSpec,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    dtype: str,
    permit: Callable[[int], None],
    progress: Progress | None,
) -> Made:
    """Write the manifest of a Hugging Face folder: the tensors that its library loads in ``dtype``.

    If the format of the folder's weights is not ``fmt``, write the state dict, too: in the widest
    dtype of the files, or in float32 for a GGUF file. This needs memory for the loaded model.

    Raises:
        CheckpointError: the library cannot load the folder or would initialise missing weights at
            random, or ``fmt`` is not the format of quantised weights.
    """
    started = time.monotonic()
    slices = formats.read(checkpoint)
    own = slices.format
    if (quantised := of_model(spec)) and own != fmt:
        raise CheckpointError(
            f"{checkpoint}: {quantised.summary}; from_pretrained reads these weights from the format"
            f" {own}, not from {fmt}",
            "leave --format out",
        )
    permit(sum(RECORD_BYTES + where.nbytes for where in slices) if own != fmt else 0)
    sums: dict[str, dict[str, str]] = {}
    if own != fmt:
        wide = torch.float32 if own == gguf.NAME else widest_dtype(slices)
        written = {one.name: one for one in described_in(_loaded(spec, checkpoint, wide))}

        def pieces(name: str) -> Iterator[torch.Tensor]:
            tensor = written[name].tensor
            running = Checksums(tensor.numel(), tensor.dtype)
            return checksummed(pieces_of(tensor), running, sums, name)

        write(fmt, folder, plans(in_checkpoint([*written.values()])), pieces, progress)
        written.clear()
    reference = _loaded(spec, checkpoint, getattr(torch, dtype))
    read = time.monotonic()
    described = [*described_in(reference)]
    for one in described:
        kind = dtype_name(one.tensor.dtype)
        if one.shared_with is None:
            known = sums.get(one.name, {}).get(kind)
            sums[one.name] = {kind: known or checksum(one.tensor)}
            if progress is not None and own == fmt:
                progress(one.tensor.nbytes)
    of_file = {}
    if own == fmt and spec.builder == BUILDER and not quantised:
        of_file = _values_of_file(reference, slices, sums)
    entries = tuple(
        replace(one.entry(sums[first]), file_checksums=of_file.get(first))
        for one in described
        if (first := one.shared_with or one.name)
    )
    note = f"quantised with {quantised.method}" if quantised else _other_keys(slices, described)
    manifest = Manifest(
        spec.name, spec.builder, str(checkpoint), entries, "" if own == gguf.NAME else note
    )
    manifest.write(folder / "manifest.json")
    return Made(manifest, {"read": read - started, "convert": time.monotonic() - read})


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


def _values_of_file(
    reference: torch.nn.Module, slices: Slices, sums: Mapping[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    """Return checksums of the values in the file, for tensors that ``from_pretrained`` changes."""
    places = {where.name: where for where in slices}
    found = {}
    for name in written_after_load(reference) & places.keys() & sums.keys():
        place, (kind,) = places[name], sums[name]
        values = torch.empty(place.shape, dtype=getattr(torch, kind))
        read_into(place, values)
        if (of_file := {kind: checksum(values)}) != sums[name]:
            found[name] = of_file
    return found


def _other_keys(slices: Slices, described: list[Described]) -> str:
    """Return a text that counts the keys in which the file and the model differ; empty for none."""
    stored = {where.name for where in slices}
    groups: dict[str, set[str]] = {}
    for one in in_checkpoint(described):
        groups.setdefault(one.shared_with or one.name, set()).add(one.name)
    left = len(stored.difference(*groups.values()))
    computed = 0 if left else sum(not names & stored for names in groups.values())
    counts = {"converted, renamed or left out": left, "computed": computed}
    return " and ".join(
        f"{count} {'key' if count == 1 else 'keys'} {what}"
        for what, count in counts.items()
        if count
    )


class _IndexedChecksums:
    """Computes the checksums of a checkpoint's tensors while a writer or ``complete`` reads them."""

    def __init__(self, places: Mapping[str, TensorSlice], kept: Set[str]) -> None:
        self.by_name: dict[str, dict[str, str]] = {}  # several threads set one item each
        self._places, self._kept = places, kept

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's values in pieces, and then put their checksums into ``by_name``."""
        place = self._places[name]
        numel = torch.Size(place.shape).numel()
        running = Checksums(numel, place.dtype, is_kept=name in self._kept)
        return checksummed(read_pieces(place), running, self.by_name, name)

    def complete(self, progress: Progress | None) -> None:
        """Compute the checksums of each tensor that has none yet; read tied tensors only once."""
        names: dict[object, list[str]] = {}
        for name, where in self._places.items():
            names.setdefault(where.place, []).append(name)
        run_parallel(partial(self._sum, group, progress) for group in names.values())

    def _sum(self, names: list[str], progress: Progress | None) -> None:
        summed = next((name for name in names if name in self.by_name), None)
        if summed is None:
            summed = names[0]
            for piece in self.pieces(summed):
                if progress is not None:
                    progress(piece.nbytes)
        for name in names:
            self.by_name.setdefault(name, self.by_name[summed])


def check_fits(
    checkpoint: Path, model: str, places: Mapping[str, TensorSlice], described: list[Described]
) -> None:
    """Raise CheckpointError if the checkpoint's keys or shapes differ from those of the model."""
    wanted = {stored.name: tuple(stored.tensor.shape) for stored in in_checkpoint(described)}
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


def _check_ties(
    checkpoint: Path, checksums: Mapping[str, dict[str, str]], described: list[Described]
) -> None:
    for tensor in in_checkpoint(described):
        first = tensor.shared_with
        if first and checksums[tensor.name] != checksums[first]:
            raise CheckpointError(
                f"{checkpoint}: {tensor.name!r} and {first!r} are one tensor in the model, "
                "but have different values in the file",
                "choose the model from which this checkpoint was saved",
            )
