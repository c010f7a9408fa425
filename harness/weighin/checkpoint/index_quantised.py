"""Write the manifest of a quantised Hugging Face folder: the tensors of the loaded model."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.describe import Described, described_in
from weighin.checkpoint.generate import Made
from weighin.checkpoint.manifest import Manifest, TensorEntry
from weighin.checkpoint.piecewise import CELL_DTYPES
from weighin.construction.skeleton import build_skeleton, construct
from weighin.errors import CheckpointError
from weighin.formats.dtypes import dtype_name
from weighin.formats.misfit import first_names
from weighin.formats.pretrained_folder import BUILDER, folder_of
from weighin.formats.pretrained_library import ARGUMENT
from weighin.formats.quantised import Quantised
from weighin.loader.converting import convert_whole
from weighin.loader.load import load_streaming
from weighin.models.dequantising import arguments_to_dequantise
from weighin.models.pretrained import from_config, merged, pretrained_class
from weighin.models.pretrained_keys import map_keys
from weighin.text import one_line


def index_quantised(
    spec: ModelSpec, found: Quantised, checkpoint: Path, fmt: str, folder: Path
) -> Made:
    """Write the manifest into ``folder``.

    ``index_quantised`` loads the whole model into memory, in each dtype of ``CELL_DTYPES`` in turn.
    The expected values come from ``from_pretrained``, or from ``load_streaming`` if only weighin
    can dequantise the codes.

    Raises:
        CheckpointError: ``from_pretrained`` cannot load the folder, ``fmt`` is not the checkpoint's
            format, or an adapter would be merged into weights that only weighin dequantises.
    """
    started, kwargs = time.monotonic(), spec.kwargs
    own = formats.detect(checkpoint).NAME
    if own != fmt:
        raise CheckpointError(
            f"{checkpoint}: {found.summary}; from_pretrained reads these weights from the format"
            f" {own}, not from {fmt}",
            "leave --format out",
        )
    adapter = kwargs.get(ARGUMENT, "")
    if found.own and adapter:
        raise CheckpointError(
            f"{checkpoint}: {found.summary}; weighin cannot merge an adapter into quantised"
            " weights",
            "first write the dequantised weights into a new folder, and use that folder: weighin"
            f" convert {checkpoint} FOLDER --keys model",
        )
    if found.own:
        entries = _own_entries(kwargs, checkpoint)
    else:
        kind = pretrained_class(kwargs["architecture"], kwargs.get("code"), kwargs["config"])
        arguments = arguments_to_dequantise(checkpoint)
        entries = _entries(kind, folder_of(checkpoint), found, arguments, adapter)
    manifest = Manifest(
        spec.name, BUILDER, str(checkpoint), entries, f"quantised with {found.method}"
    )
    manifest.write(folder / "manifest.json")
    return Made(manifest, {"read": time.monotonic() - started})


def _entries(
    kind: Any, source: Path, found: Quantised, arguments: Mapping[str, Any], adapter: str
) -> tuple[TensorEntry, ...]:
    """Return the entries of the tensors that from_pretrained loads, with checksums in each dtype.

    ``_entries`` loads the model in each dtype, because weights that are dequantised to float32 and
    then rounded to bfloat16 may differ from weights that are dequantised to bfloat16. ``arguments``
    make from_pretrained dequantise the codes; without them, some models keep the codes.
    """
    sums: dict[str, dict[str, str]] = {}
    described: list[Described] = []
    for wanted in CELL_DTYPES:
        try:
            loaded, info = kind.from_pretrained(
                source,
                dtype=getattr(torch, wanted),
                output_loading_info=True,
                local_files_only=True,
                **arguments,
            )
        except (ImportError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{source}: {found.summary}; from_pretrained fails: {one_line(str(error))}",
                f"install the packages that from_pretrained names (it needs {found.needed}), or"
                " correct quantization_config in config.json",
            ) from error
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{source}: {found.summary}; from_pretrained finds no values for"
                f" {first_names(missing)}, because"
                " quantization_config in config.json does not describe these tensors",
                "copy 'quantization_config' from the config.json that the quantising library wrote"
                " beside the weights",
            )
        described = [*described_in(merged(loaded, adapter) if adapter else loaded)]
        for one in described:
            if one.shared_with is None:
                of_tensor = sums.setdefault(one.name, {})
                of_tensor[dtype_name(one.tensor.dtype)] = checksum(one.tensor)
    return tuple(one.entry(sums[one.shared_with or one.name]) for one in described)


def _own_entries(kwargs: Mapping[str, Any], checkpoint: Path) -> tuple[TensorEntry, ...]:
    """Return the entries of the tensors that load_streaming loads, with checksums in each dtype.

    ``load_streaming`` dequantises in pieces. ``_own_entries`` dequantises each matrix a second
    time, from whole tensors, and takes the checksum of the result.
    """
    slices = formats.read(checkpoint)[1]
    sums: dict[str, dict[str, str]] = {}
    described: list[Described] = []
    for wanted in CELL_DTYPES:
        kind = getattr(torch, wanted)
        loaded = load_streaming(
            partial(construct, partial(from_config, **kwargs), kind), checkpoint
        )
        model = build_skeleton(from_config, kwargs, dtype=kind)
        conversions = {one.name: one for one in map_keys(model, slices).conversions}
        described = [*described_in(loaded)]
        for one in described:
            if one.shared_with is not None:
                continue
            value = one.tensor
            if conversion := conversions.get(one.name):
                value = torch.empty_like(value)
                convert_whole(model, conversion, {one.name: value})
            sums.setdefault(one.name, {})[dtype_name(value.dtype)] = checksum(value)
    return tuple(one.entry(sums[one.shared_with or one.name]) for one in described)
