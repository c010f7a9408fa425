"""Define a stack of equal linear layers, to see what a load costs per tensor.

Two stacks of one size, one with many small tensors and one with few large ones, take the same time
in a loader whose cost depends only on the number of bytes.
"""

import torch
from torch import nn


def stack(*, layers: int, width: int) -> nn.Module:
    """Return ``layers`` linear layers without biases, of ``width`` x ``width``, in evaluation mode."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).eval()


def example_inputs(*, width: int, **_: object) -> torch.Tensor:
    """Return the argument of one forward pass: 1 x ``width`` ones."""
    return torch.ones(1, width)
