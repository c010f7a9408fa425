"""Write the manifest of a Hugging Face folder: the tensors that ``from_pretrained`` loads."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.describe import Described, described_in, in_checkpoint
from weighin.checkpoint.generate import RECORD_BYTES, Made, plans, write
from weighin.checkpoint.manifest import Manifest
from weighin.checkpoint.piecewise import (
    CELL_DTYPES,
    Checksums,
    checksummed,
    pieces_of,
    tensor_checksums,
)
from weighin.checkpoint.reader import widest_dtype
from weighin.construction.skeleton import non_persistent_buffers
from weighin.formats import gguf
from weighin.formats.base import Progress
from weighin.formats.dtypes import dtype_name
from weighin.formats.pretrained_folder import BUILDER
from weighin.loader.lazy_state import read_whole
from weighin.models.after_load import written_after_load
from weighin.models.pretrained_keys import MappedKeys, lacks, map_keys
from weighin.models.pretrained_modules import module_of


def index_pretrained(
    spec: ModelSpec,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    permit: Callable[[int], None],
    progress: Progress | None,
) -> Made:
    """Write the manifest into ``folder``; also write the state dict there if ``fmt`` is not the
    checkpoint's own format.

    ``index_pretrained`` loads the model with ``from_pretrained``, and so needs as much memory as
    that function.

    Raises:
        CheckpointError: ``from_pretrained`` fails, or would initialise missing weights at random.
    """
    started = time.monotonic()
    own, slices = formats.read(checkpoint)
    permit(sum(RECORD_BYTES + where.nbytes for where in slices) if own != fmt else 0)
    library = module_of(spec.builder)
    # transformers dequantises GGUF in float32 or in the wanted dtype.
    is_gguf = own == gguf.NAME
    loaded, missing = library.reference(
        spec.kwargs, checkpoint, torch.float32 if is_gguf else widest_dtype(slices)
    )
    if missing:
        raise lacks(checkpoint, missing, loaded)
    described = [*described_in(loaded)]
    read = time.monotonic()
    sums: dict[str, dict[str, str]] = {}
    by_name = {one.name: one for one in described}
    pieces = partial(_summed, sums, by_name)
    stored = in_checkpoint(described)
    if own != fmt:
        write(fmt, folder, plans(stored), pieces, progress)
    for one in stored:
        if one.shared_with is None and one.name not in sums:
            for piece in pieces(one.name):
                if progress is not None and own == fmt:
                    progress(piece.nbytes)
    mapped = None if is_gguf else map_keys(loaded, slices)
    of_file = {}
    if mapped and own == fmt and spec.builder == BUILDER:
        of_file = _values_of_file(loaded, mapped, sums)
    computed = mapped.computed if mapped else tuple(sums)
    if len(stored) < len(described) or computed:
        for wanted in CELL_DTYPES:
            other, _ = library.reference(spec.kwargs, checkpoint, getattr(torch, wanted))
            for name, (owner, leaf) in non_persistent_buffers(other):
                value = owner._buffers[leaf]
                assert value is not None
                sums.setdefault(name, {})[dtype_name(value.dtype)] = checksum(value)
            for name in computed if own == fmt else ():
                value = other.state_dict()[name]
                sums[name][dtype_name(value.dtype)] = checksum(value)
    kept = _kept_in_float32(library, loaded, sums)
    entries = tuple(
        replace(
            one.entry(sums[first], torch.float32 if first in kept else None),
            file_checksums=of_file.get(first),
        )
        for one in described
        if (first := one.shared_with or one.name)
    )
    note = mapped.note if mapped else ""
    manifest = Manifest(spec.name, spec.builder, str(checkpoint), entries, note)
    manifest.write(folder / "manifest.json")
    return Made(manifest, {"read": read - started, "convert": time.monotonic() - read})


def _values_of_file(
    reference: Any, mapped: MappedKeys, sums: Mapping[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    """Return checksums of the values in the file, for tensors that ``from_pretrained`` changes."""
    written = written_after_load(reference)
    wanted = reference.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    for name, tensor in wanted.items():
        firsts.setdefault(id(tensor), name)
    stored = {source.name: read_whole(source) for source in mapped.slices if source.name in written}
    for conversion in mapped.conversions:
        if written.intersection(conversion.targets(reference)):
            stored |= conversion.apply(
                reference, [read_whole(one) for _, one in conversion.sources]
            )
    of_file = {}
    for name in written & stored.keys():
        first = firsts[id(wanted[name])]
        checksums = tensor_checksums(stored[name].to(wanted[name].dtype))
        if any(sums[first].get(dtype, value) != value for dtype, value in checksums.items()):
            of_file[first] = checksums
    return of_file


def _kept_in_float32(library: Any, model: Any, sums: dict[str, dict[str, str]]) -> set[str]:
    """Return the names of the weights that the class keeps in float32 in a model of another dtype,
    and remove the checksums of these weights in that dtype.
    """
    kept = set()
    for wanted in CELL_DTYPES:
        for name, checksums in sums.items():
            if library.keeps_in_float32(model, name, getattr(torch, wanted)):
                kept.add(name)
                if wanted != "float32":
                    checksums.pop(wanted, None)
    return kept


def _summed(
    sums: dict[str, dict[str, str]], described: Mapping[str, Described], name: str
) -> Iterator[torch.Tensor]:
    """Yield a tensor's values, and then put the checksums of these values into ``sums``."""
    tensor = described[name].tensor
    running = Checksums(tensor.numel(), tensor.dtype)
    return checksummed(pieces_of(tensor), running, sums, name)
