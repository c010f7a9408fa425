"""Compare a user's own checkpoint with a model, and write the checkpoint's manifest."""

import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from weighin import formats
from weighin.cell import ModelSpec
from weighin.checkpoint.describe import Described, buffer_checksums, describe, in_checkpoint
from weighin.checkpoint.generate import RECORD_BYTES, Made, plans, write
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.piecewise import Checksums, checksummed
from weighin.checkpoint.reader import read_pieces
from weighin.construction.skeleton import map_large_tensors
from weighin.errors import CheckpointError
from weighin.formats.base import Progress, TensorSlice
from weighin.formats.misfit import NOT_MEASURED, check_converts, misfit, plain, selecting
from weighin.formats.pretrained_folder import is_pretrained_checkpoint, refuse_part
from weighin.formats.pretrained_library import library_of
from weighin.formats.quantised import of_model, refuse_codes
from weighin.formats.selection import WHOLE, Selection
from weighin.formats.zip_writer import run_parallel


def index(
    spec: ModelSpec,
    *,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    selection: Selection = WHOLE,
    permit: Callable[[int], None] = lambda _: None,
    progress: Progress | None = None,
) -> Made:
    """Write the manifest of a user's checkpoint into ``folder``, and convert the checkpoint if needed.

    ``index`` reads tensors piece by piece, but leaves Hugging Face folders to ``index_pretrained``
    or ``index_quantised``, which load the whole model. ``index`` converts the checkpoint if its
    format is not ``fmt``, if it holds objects other than tensors, or if ``selection`` is not
    ``WHOLE``.
    ``index`` calls ``permit`` with an upper bound of the bytes to write.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the model.
    """
    formats.known(fmt)
    map_large_tensors()
    if library_of(spec.builder) and is_pretrained_checkpoint(checkpoint):
        refuse_part(checkpoint, selection)
        from weighin.checkpoint.index_pretrained import index_pretrained
        from weighin.checkpoint.index_quantised import index_quantised

        if found := of_model(spec):
            return index_quantised(spec, found, checkpoint, fmt, folder)
        return index_pretrained(spec, checkpoint, fmt, folder, permit, progress)
    torch.set_num_threads(1)  # the readers run in several threads of their own
    started = time.monotonic()
    own, slices = formats.read(checkpoint, selection)
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
