"""Refuse quantised tensors (codes) if the load would leave out the scales that belong to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice
from weighin.formats.companions import find_codes
from weighin.formats.quantised import in_checkpoint
from weighin.models.dequantising import quantiser_of
from weighin.text import first_names, plain

if TYPE_CHECKING:
    from weighin.models.pretrained_keys import MappedKeys


def refuse_left_out_scales(
    model: torch.nn.Module, slices: Sequence[TensorSlice], mapped: "MappedKeys", checkpoint: Path
) -> None:
    """Raise CheckpointError if the model has no tensor for the scales of quantised tensors.

    Integers or 8-bit floats in the file count as codes if the tensor of the same name in the model
    has another float dtype. The file must also have a key of the same module that the model lacks.
    This key counts as the scale. If the model has a quantiser, the two dtypes may be equal, because
    a tensor that the quantiser does not convert keeps the file's dtype.

    Args:
        slices: the tensors under their names in the file.
        mapped: the tensors under their names in the model.
    """
    left_out = {_module(name): name for name in mapped.unexpected}
    names = {(one.file, one.offset): one.name for one in slices}
    wanted = model.state_dict(keep_vars=True)
    for one in mapped.slices:
        name, target = names.get((one.file, one.offset), one.name), wanted[one.name]
        scale = left_out.get(_module(name))
        if (
            scale
            and _is_code(one.dtype)
            and target.is_floating_point()
            and (target.dtype != one.dtype or quantiser_of(model))
        ):
            raise CheckpointError(
                f"{checkpoint}: {plain(name)} is {one.dtype_name} in the file, but the model has no"
                f" {plain(scale)}: the values are quantised codes, which mean nothing without this"
                " scale",
                "load the model with the library that quantised the weights",
            )


def refuse_codes_left(
    model: torch.nn.Module, checkpoint: Path, slices: Sequence[TensorSlice], mapped: "MappedKeys"
) -> None:
    """Raise CheckpointError if the model's quantiser does not convert codes together with their scales."""
    if not quantiser_of(model):
        return
    groups = {
        source.name: number
        for number, one in enumerate(mapped.conversions)
        for _, source in one.sources
    }
    left = [
        one.where.name
        for one in find_codes(slices)
        if one.where.name not in groups or groups[one.where.name] != groups.get(one.scales)
    ]
    left += [name for name in mapped.unexpected if name.endswith("_g_idx")]
    if left and (found := in_checkpoint(checkpoint, slices)):
        raise CheckpointError(
            f"{checkpoint}: {found.summary}; quantization_config in config.json does not describe"
            f" {first_names(left)}",
            "copy 'quantization_config' from the config.json that the quantising library wrote"
            " beside the weights",
        )


def _is_code(kind: torch.dtype) -> bool:
    if kind is torch.bool or kind.is_complex:
        return False
    return kind.itemsize == 1 or not kind.is_floating_point


def _module(name: str) -> str:
    return name.rpartition(".")[0]
