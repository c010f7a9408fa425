"""Build modules without a forward pass, for models that consist of their tensors alone."""

from torch import nn


def named(**parts: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(parts)
