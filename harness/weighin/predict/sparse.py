"""Write checkpoints without values: sparse files, which use almost no disk space."""

import fnmatch
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint import reader, truth
from weighin.checkpoint.checksum import CELL_DTYPES
from weighin.checkpoint.manifest import Manifest
from weighin.models import pretrained
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.construct import build_skeleton, resolve_builder
from weighin.stream.foreign import lacks, misfit
from weighin.stream.pretrained_folder import own_dtype, refuse_part
from weighin.stream.pretrained_library import TIMM, WHOLE, Selection, library_of, module_of
from weighin.stream.write import write


def make_sparse(
    model: ModelSpec,
    fmt: str,
    dtype: str | None,
    folder: Path,
    source: Path | None = None,
    selection: Selection = WHOLE,
) -> Path:
    """Write a checkpoint in format ``fmt`` without values; return its path.

    The new checkpoint has the tensors that ``selection`` selects in the checkpoint ``source``, or
    all tensors of ``model`` if ``source`` is None. For a model of a library (transformers), it has
    the model's tensors in the widest dtype of ``source``, because a Hugging Face folder's keys may
    differ from the model's. ``dtype`` replaces the dtype of floating-point tensors, except those
    that always keep theirs; None means the dtypes that ``weighin bench`` writes.

    Raises:
        ConfigError: the builder cannot be used.
        CheckpointError: ``source`` cannot be read.
    """
    kind = getattr(torch, dtype or own_dtype(model))
    if source is not None:
        slices = formats.read(source, selection)
        kind = reader.widest_dtype(slices)
    kept: set[str] = set()
    if source is not None and library_of(model.builder) is None:
        tensors = reader.plans(slices)
    else:
        described = truth.describe(model, real_buffers="non_persistent", dtype=kind)
        tensors = truth.plans(described)
        kept = {name for name, one in described.items() if one.is_kept}
    if dtype is not None:
        tensors = [
            replace(one, dtype=getattr(torch, dtype))
            if one.dtype.is_floating_point and one.name not in kept
            else one
            for one in tensors
        ]
    target = formats.checkpoint_in(folder, fmt)
    target.parent.mkdir(parents=True)
    write(fmt, target, tensors, None)
    return target


def main_dtype(checkpoint: Path) -> str:
    """Return the dtype that most bytes of a checkpoint have; "" for an empty checkpoint."""
    sizes: Counter[str] = Counter()
    for one in formats.read(checkpoint):
        sizes[one.dtype_name] += one.nbytes
    return next((name for name, _ in sizes.most_common(1)), "")


def refuse_misfit(model: ModelSpec, source: Path, selection: Selection) -> None:
    """Raise an error for a checkpoint that no strategy can load into a library's model.

    Raises:
        CheckpointError: ``source`` lacks weights, has them in another shape, or cannot be read; or
            ``selection`` selects a part of a Hugging Face folder.
    """
    refuse_part(source, selection)
    slices = formats.read(source, selection)
    if slices.format == gguf.NAME or quantised.of_model(model) or model.builder == TIMM.builder:
        return  # the load alone tells
    builder = resolve_builder(model.builder)
    built = build_skeleton(builder, model.kwargs, real_buffers="non_persistent")
    wanted = built.state_dict(keep_vars=True)
    # None: a conversion of the library gives the shape.
    shapes: dict[str, tuple[int, ...] | None] = {}
    library = module_of(model.builder)
    if library is pretrained:
        names = pretrained.ModelNames(built)
        for one in slices:
            name, pattern = names.of(one.name)
            if pattern is None:
                shapes[name] = one.shape
                continue
            first, *more = names.by_pattern[pattern].target_patterns
            for target in (first, *more):
                found = fnmatch.filter(wanted, name.replace(first, target))
                shapes |= dict.fromkeys([name, *found])
    else:
        shapes |= {name: one.shape for name, one in library.named_as_in(built, slices).items()}
    kind = type(built).__name__
    others = [
        name
        for name, shape in shapes.items()
        if shape and name in wanted and wanted[name].shape != shape
    ]
    if others:
        raise misfit(source, kind, {"of another shape": others})
    values = {id(wanted[name]) for name in shapes if name in wanted}  # also under its tied names
    values |= {id(buffer) for buffer in built.buffers()}
    if library is pretrained:
        values |= {id(wanted[name]) for name in pretrained.computed_keys(built)}
    if missing := sorted(name for name, tensor in wanted.items() if id(tensor) not in values):
        raise lacks(source, missing, kind)


def write_manifest(model: ModelSpec, dtype: str, folder: Path) -> Path:
    """Write a manifest (list of the model's tensors) with false checksums; return its path.

    ``dtype`` is the dtype of the load. Linux refuses to allocate a tensor that is larger than this
    machine's RAM, even if the tensor is never written. A wider dtype than that of the load would
    therefore make some large models impossible.
    """
    kind = getattr(torch, dtype)
    described = truth.describe(model, real_buffers="non_persistent", dtype=kind)
    blank = dict.fromkeys(CELL_DTYPES, "0" * 16)
    entries = tuple(one.entry(blank) for one in described.values())
    path = folder / "manifest.json"
    folder.mkdir(parents=True, exist_ok=True)
    Manifest(model.name, model.builder, "predicted", entries).write(path)
    return path
