"""Describe the model of a Hugging Face folder as a ``ModelSpec``, by its configuration and its weights."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.formats import adapters, catalog, quantised
from weighin.formats.base import TensorSlice
from weighin.formats.bounded_json import read_object
from weighin.formats.hub_cache import name_of
from weighin.formats.pretrained_folder import (
    MODEL_DTYPES,
    PretrainedFolder,
    checked_dtype,
    dtype_of,
    index_in,
)
from weighin.formats.selection import WHOLE, Selection
from weighin.formats.storages import are_equal, are_equal_in
from weighin.formats.unknown_file import RESAVE

_TIES: Final = "tie_word_embeddings"
_NUMBERED: Final = re.compile(r"\.\d+\.")


def spec_of(
    folder: PretrainedFolder, selection: Selection = WHOLE, *, merges: bool = False
) -> ModelSpec:
    """Return the ``ModelSpec`` of a folder's model, with the class and configuration as arguments.

    ``selection`` chooses the weights in the folder's checkpoint. With ``merges``, the caller itself
    merges an adapter, so that a folder with an adapter is allowed.

    Raises:
        CheckpointError: the weights cannot be read, or from_pretrained adds the folder's adapter to the
            weights.
        ConfigError: a model cannot have the dtype that ``config.json`` names, or the class is
            unknown, or is in code of the folder that may not run.
    """
    if not merges:
        adapters.refuse(folder.path)
    library = folder.library
    if library.fixed_dtype:
        kwargs: dict[str, Any] = {"architecture": folder.architecture, "config": folder.config}
        return ModelSpec(name_of(folder.path.resolve()), library.builder, kwargs)
    config = {"architectures": None} | folder.config
    if dtype_of(config) is None:
        config = {**config, "dtype": auto_dtype(folder, selection)}
    kwargs = {"architecture": folder.architecture, "config": config}
    if code := folder.code:
        kwargs["code"] = code
    slices = catalog.read(folder.checkpoint, selection)[1]
    if apart := kept_apart(config, slices):
        kwargs["apart"] = apart
    if found := quantised.of_folder(folder.path, folder.config, slices):
        kwargs["quantised"] = found.as_argument()
    return ModelSpec(name_of(folder.path.resolve()), library.builder, kwargs)


def plain_spec_of(
    folder: PretrainedFolder, selection: Selection = WHOLE, *, merges: bool = False
) -> ModelSpec:
    """Return the result of ``spec_of``, for a caller that copies the file's tensors into the model.

    Raises:
        CheckpointError: as for ``spec_of``, or the tensors are quantised codes that ``load_streaming``
            does not dequantise.
    """
    spec = spec_of(folder, selection, merges=merges)
    if (found := quantised.of_model(spec)) and not found.dequantises:
        raise found.error(folder.path)
    return spec


def kept_apart(
    config: Mapping[str, Any], slices: Sequence[TensorSlice]
) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of tensors that the model's class may tie, but that differ in a model's dtype.

    ``from_pretrained`` does not tie an output head to the embedding if the file has different
    values for the two. ``kept_apart`` compares the matrices of equal shape that have a row for each
    token of the vocabulary, but no two matrices of numbered layers. The pairs for float32 are also
    those for dtypes that the result lacks. The result is empty if ``config.json`` ties no tensors.

    Raises:
        CheckpointError: a file cannot be read.
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    if not any(part.get(_TIES, True) for part in parts):
        return {}
    sizes = {
        value
        for part in parts
        for key, value in part.items()
        if "vocab_size" in key and isinstance(value, int)
    }
    if not sizes:  # config.json may leave a usual size out
        sizes = {max((one.shape[0] for one in slices if len(one.shape) > 1), default=0)}
    rows = [one for one in slices if one.nbytes and one.shape and one.shape[0] in sizes]
    different = [
        (one, other)
        for one, other in combinations(rows, 2)
        if one.shape == other.shape
        and not (_NUMBERED.search(one.name) and _NUMBERED.search(other.name))
        and not are_equal(one, other)
    ]
    apart = {
        dtype: [(a.name, b.name) for a, b in different if not are_equal_in(dtype, a, b)]
        for dtype in MODEL_DTYPES
    }
    usual = apart["float32"]
    return (
        {name: pairs for name, pairs in apart.items() if name == "float32" or pairs != usual}
        if different
        else {}
    )


def auto_dtype(folder: PretrainedFolder, selection: Selection = WHOLE) -> str:
    """Return the dtype of the model that ``from_pretrained(dtype="auto")`` builds.

    ``auto`` means the first of these dtypes that exists: the library's fixed dtype; the dtype in
    ``config.json``; the dtype in the index of shards; that of the first floating-point tensor in
    the first file of weights (of a safetensors file, the first by name); float32.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: a model cannot have this dtype.
    """
    if folder.library.fixed_dtype:
        return folder.library.fixed_dtype
    if named := dtype_of(folder.config):
        return named
    index = index_in(folder.path) if folder.checkpoint == folder.path else folder.checkpoint
    if index.suffix == ".json":
        metadata = read_object(index, RESAVE).get("metadata")
        if isinstance(metadata, dict) and "dtype" in metadata:
            return checked_dtype(metadata["dtype"], index)
    _, slices = catalog.read(folder.checkpoint, selection)
    first = min((one.file.name for one in slices), default="")
    stored = [one for one in slices if one.file.name == first]
    if first.endswith(".safetensors"):
        stored.sort(key=lambda one: one.name)
    floating = [one.dtype_name for one in stored if one.dtype_name in MODEL_DTYPES]
    return floating[0] if floating else "float32"
