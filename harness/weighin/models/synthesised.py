"""Build a model without model code, from the names, shapes and dtypes of a checkpoint's tensors."""

import torch
from torch import nn

from weighin.formats.structure import unpack


def from_tensors(*, tensors: str) -> nn.Module:
    """Return a module tree with an uninitialised parameter or buffer for each tensor.

    ``tensors`` is a string from ``weighin.formats.structure.pack``. Floating-point tensors become
    parameters. Names that ``tensors`` records as tied become one tensor. The model only holds
    tensors, and has no forward pass.

    Raises:
        ConfigError: ``tensors`` is not a string that ``pack`` wrote.
    """
    root = nn.Module()
    made: dict[str, torch.Tensor] = {}
    for one in unpack(tensors):
        *path, leaf = one.name.split(".")
        owner = root
        for part in path:  # not add_module(), which refuses names such as "type"
            child = owner._modules.setdefault(part, nn.Module())
            assert child is not None
            owner = child
        tensor = made.get(one.tied_to or "")
        if tensor is None:
            tensor = torch.empty(one.shape, dtype=getattr(torch, one.dtype_name))
            if tensor.is_floating_point():
                tensor = nn.Parameter(tensor)
        made[one.name] = tensor
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
        else:
            owner._buffers[leaf] = tensor
    return root
