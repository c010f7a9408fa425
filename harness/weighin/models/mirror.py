"""Build a model from a checkpoint's tensors alone, for checkpoints without a known model."""

from pathlib import Path

import torch
from torch import nn

from weighin import formats


def mirror(*, checkpoint: str) -> nn.Module:
    """Return a module tree with an uninitialised parameter or buffer for each key of a checkpoint.

    Reads no tensor data. Keys that share a storage in the file are tied.

    Raises:
        CheckpointError: ``checkpoint`` is not a checkpoint or is damaged.
    """
    _, slices = formats.read(Path(checkpoint))
    root = nn.Module()
    by_place: dict[tuple[Path, int], torch.Tensor] = {}
    for source in slices:
        *path, leaf = source.name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        place = source.file, source.storage_offset
        tensor = by_place.get(place) if source.storage_bytes else None
        if tensor is None or tensor.shape != source.shape:
            tensor = torch.empty(source.shape, dtype=source.dtype)
            tensor = nn.Parameter(tensor) if source.dtype.is_floating_point else tensor
            by_place[place] = tensor
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
    return root
