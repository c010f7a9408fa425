"""Run a model's forward pass, and compare its output with another model's."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of the same shape and dtype have the same bytes."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def output_of(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Return the tensors of one forward pass in evaluation mode, or the name of the error it raised."""
    args, kwargs = inputs
    torch.manual_seed(7)
    try:
        with torch.no_grad():
            return list(_leaves(model.eval()(*args, **kwargs)))
    except Exception as error:  # the reference must raise the same
        return [f"{type(error).__name__}"]


def unlike_outputs(one: list[Any], other: list[Any]) -> str:
    """Describe the first difference between two outputs; an empty string if they are equal."""
    if len(one) != len(other):
        return f"forward gives {one[:1]}, not {other[:1]}"
    for mine, right in zip(one, other, strict=True):
        if isinstance(mine, torch.Tensor) and isinstance(right, torch.Tensor):
            if mine.shape != right.shape or mine.dtype != right.dtype or not same_bits(mine, right):
                return "forward gives other values"
        elif isinstance(mine, torch.Tensor) or isinstance(right, torch.Tensor) or mine != right:
            return f"forward gives {mine!r:.60}, not {right!r:.60}"
    return ""


def _leaves(output: Any) -> Iterator[Any]:
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        for one in output:
            yield from _leaves(one)
    else:
        yield output
