"""A tensor of a model whose values are computed from the values in a file."""

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING

from weighin.formats.base import TensorSlice, frozen_in_types

if TYPE_CHECKING:
    import torch


@frozen_in_types
class Converted(TensorSlice):
    """A tensor whose values ``fill`` computes, from the tensor at this place in the file and others.

    Attributes:
        fill: writes the values into a tensor of this shape, converted to the tensor's dtype. Several
            threads may call the functions of several tensors.
    """

    fill: Callable[["torch.Tensor"], None] = field(kw_only=True)
