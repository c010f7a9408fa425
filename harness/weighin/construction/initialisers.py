"""Recognise calls of ``torch.nn.init`` that only write random numbers.

The write log records such a call faster than the ten operations of which the call consists.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

_KAIMING: Final = torch.nn.init.kaiming_uniform_
_UNIFORM: Final = torch.nn.init.uniform_
_NORMAL: Final = torch.nn.init.normal_
INITIALISERS: Final = frozenset({_KAIMING, _UNIFORM, _NORMAL})
_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_DTYPES: Final = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_LARGEST_NUMBER: Final = 1e4  # representable in each of these dtypes


def is_plain_call(func: Any, tensor: torch.Tensor, settings: Mapping[str, Any]) -> bool:
    """Tell whether a call is surely valid, and fills a contiguous CPU tensor with random numbers."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in _DTYPES
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and _is_valid(func, tensor, **settings)
    )


def _is_valid(
    func: Any,
    tensor: torch.Tensor,
    a: float = 0,
    b: float = 1,
    mean: float = 0,
    std: float = 1,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: object = None,
) -> bool:
    """Tell whether ``func`` surely accepts the settings; False also for some rare, valid settings."""
    if generator is not None:
        return False
    if func is _KAIMING:
        known = nonlinearity == "leaky_relu" and mode in {"fan_in", "fan_out"}
        return known and tensor.ndim >= 2 and -_LARGEST_NUMBER <= a <= _LARGEST_NUMBER
    low, high = (a, b) if func is _UNIFORM else (mean, std)
    if func is _NORMAL and std < 0:
        return False
    return (
        abs(low) <= _LARGEST_NUMBER
        and abs(high) <= _LARGEST_NUMBER
        and (func is _NORMAL or low <= high)
    )
