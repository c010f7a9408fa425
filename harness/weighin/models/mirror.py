"""A model that is nothing but a checkpoint's own tensors: for a checkpoint whose model is not known."""

from pathlib import Path

import torch
from torch import nn

from weighin import formats


def mirror(*, checkpoint: str) -> nn.Module:
    """Return modules with a parameter or a buffer for each key; values are not initialised.

    Reads no tensor data. Keys that share a storage in the file are tied.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
    """
    _, slices = formats.read(Path(checkpoint))
    root = nn.Module()
    known: dict[tuple[Path, int], torch.Tensor] = {}
    for one in slices:
        *path, leaf = one.name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        place = one.file, one.storage_offset
        tensor = known.get(place) if one.storage_bytes else None
        if tensor is None or tensor.shape != one.shape:
            tensor = torch.empty(one.shape, dtype=one.dtype)
            tensor = nn.Parameter(tensor) if one.dtype.is_floating_point else tensor
            known[place] = tensor
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
    return root
