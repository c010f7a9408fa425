"""What a model is called with: what ``example_inputs`` gives, a function beside its builder."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weighin.models.skeleton import Builder


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Inputs":
        """Return them with every tensor on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def as_floating(self, dtype: torch.dtype) -> "Inputs":
        """Return them with every floating-point tensor as ``dtype``, as the model's own are."""
        return self._each(lambda one: one.to(dtype) if one.is_floating_point() else one)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        return Inputs(_changed(self.positional, change), _changed(self.keywords, change))


def example_inputs(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Inputs | None:
    """Return what the builder's module gives for one forward pass; None where it gives nothing.

    A tuple or list holds positional arguments, a mapping keyword arguments; a tensor is the one
    argument. They lie on the CPU, with floating-point tensors as ``dtype``.
    """
    examples = getattr(sys.modules[builder.__module__], "example_inputs", None)
    given = examples(**kwargs) if examples else None
    if isinstance(given, torch.Tensor):
        given = (given,)
    if not given:
        return None
    if isinstance(given, Mapping):
        return Inputs(keywords=dict(given)).as_floating(dtype)
    return Inputs(tuple(given)).as_floating(dtype)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors changed, inside tuples, lists and dicts as well."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _changed(one, change) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(partial(_changed, change=change), value))
    return value
