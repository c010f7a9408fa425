"""Define a stack of equal linear layers: many small tensors, or few large ones of as many bytes."""

import torch
from torch import nn


def stack(*, layers: int, width: int, inner: int | None = None) -> nn.Module:
    """Return linear layers without biases; with ``inner``, they alternate between two widths."""
    sizes = (width, inner or width)
    made = (nn.Linear(sizes[at % 2], sizes[(at + 1) % 2], bias=False) for at in range(layers))
    return nn.Sequential(*made).eval()


def nested(*, blocks: int, layers: int, width: int, inner: int | None = None) -> nn.Module:
    made = (stack(layers=layers, width=width, inner=inner) for _ in range(blocks))
    return nn.Sequential(*made).eval()


def example_inputs(*, width: int, **_: object) -> torch.Tensor:
    return torch.ones(1, width)
