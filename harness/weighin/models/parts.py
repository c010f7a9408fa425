"""Build modules without a forward pass, for models that consist of their tensors alone."""

from torch import nn


def named(**parts: nn.Module) -> nn.ModuleDict:
    """Return a module that holds other modules under their names."""
    return nn.ModuleDict(parts)
