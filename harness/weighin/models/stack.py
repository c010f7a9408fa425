"""Define a stack of equal linear layers, to measure how load time depends on tensor size.

To do so, compare the loads of two stacks with the same number of bytes: one of many small tensors,
and one of few large tensors. If the load time depends only on the bytes, both loads take the
same time.
"""

import torch
from torch import nn


def stack(*, layers: int, width: int, inner: int | None = None) -> nn.Module:
    """Return ``layers`` linear layers without biases, in evaluation mode.

    Each layer is ``width`` x ``width``. With ``inner``, the layers alternate between ``width`` x ``inner``
    and ``inner`` x ``width``, and their number must be even.
    """
    sizes = (width, inner or width)
    made = (nn.Linear(sizes[at % 2], sizes[(at + 1) % 2], bias=False) for at in range(layers))
    return nn.Sequential(*made).eval()


def nested(*, blocks: int, layers: int, width: int, inner: int | None = None) -> nn.Module:
    """Return ``blocks`` modules in sequence, each a ``stack`` of ``layers`` linear layers."""
    made = (stack(layers=layers, width=width, inner=inner) for _ in range(blocks))
    return nn.Sequential(*made).eval()


def example_inputs(*, width: int, **_: object) -> torch.Tensor:
    """Return the argument of one forward pass: 1 x ``width`` ones."""
    return torch.ones(1, width)
