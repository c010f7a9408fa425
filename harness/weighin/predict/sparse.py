"""Write checkpoints without values: sparse files, which use almost no disk space."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint import reader, truth
from weighin.checkpoint.checksum import CELL_DTYPES
from weighin.checkpoint.manifest import Manifest
from weighin.stream import formats
from weighin.stream.pretrained_folder import own_dtype
from weighin.stream.pretrained_library import WHOLE, Selection, library_of
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
    wanted = getattr(torch, dtype or own_dtype(model))
    slices = None if source is None else formats.read(source, selection)
    kept: set[str] = set()
    if slices is not None and library_of(model.builder) is None:
        tensors = reader.plans(slices)
    else:
        kind = wanted if slices is None else reader.widest_dtype(slices)
        described = truth.describe(model, kind)
        tensors = truth.plans(described)
        kept = {name for name, one in described.items() if one.is_kept}
    if dtype is not None:
        tensors = [
            replace(one, dtype=wanted)
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


def write_manifest(model: ModelSpec, dtype: str, folder: Path) -> Path:
    """Write a manifest (list of the model's tensors) with false checksums; return its path.

    ``dtype`` is the dtype of the load. Linux refuses to allocate a tensor that is larger than this
    machine's RAM, even if the tensor is never written. A wider dtype than that of the load would
    therefore make some large models impossible.
    """
    kind = getattr(torch, dtype)
    described = truth.describe(model, kind)
    blank = dict.fromkeys(CELL_DTYPES, "0" * 16)
    entries = tuple(one.entry(blank) for one in described.values())
    path = folder / "manifest.json"
    folder.mkdir(parents=True, exist_ok=True)
    Manifest(model.name, model.builder, "predicted", entries).write(path)
    return path
