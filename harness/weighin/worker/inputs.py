"""Get the arguments of a model's forward pass from the function ``example_inputs`` of its builder."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from weighin.construction.skeleton import Builder


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Inputs":
        return self._each(lambda tensor: tensor.to(device))

    def as_floating(self, dtype: torch.dtype) -> "Inputs":
        """Return the inputs with every floating-point tensor converted to the model's ``dtype``."""
        return self._each(lambda value: value.to(dtype) if value.is_floating_point() else value)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        arguments = (self.positional, self.keywords)
        positional, keywords = tree_map_only(torch.Tensor, change, arguments)
        return Inputs(positional, keywords)


def example_inputs(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Inputs | None:
    """Return the inputs of one forward pass; None if the builder's module has no ``example_inputs``.

    ``example_inputs`` may return a tuple or list of positional arguments, a mapping of keyword
    arguments, or one tensor. The inputs are on the CPU, with floating-point tensors of ``dtype``.
    """
    examples = getattr(sys.modules[builder.__module__], "example_inputs", None)
    arguments = examples(**kwargs) if examples else None
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if not arguments:
        return None
    if isinstance(arguments, Mapping):
        return Inputs(keywords=dict(arguments)).as_floating(dtype)
    return Inputs(tuple(arguments)).as_floating(dtype)
