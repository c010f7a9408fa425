"""Constants that a constructor computes layer after layer, such as masks, in the same memory again."""

import ctypes
import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

FUNCTIONS: Final = frozenset({torch.ones, torch.zeros, torch.triu, torch.tril})
"""What is computed into memory that was used before."""

_SMALLEST_BYTES: Final = 1024**2
_KNOWN: Final = frozenset({"dtype", "device", "diagonal"})  # keyword arguments


class RecycledConstants:
    """Memory for large constants: taken again once no tensor, view or array has it any more.

    Each page of fresh memory costs a fault: of GPT-2's masks, one for each layer, those took 0.08 of
    the 0.19 s of building gpt2-large. What is computed here cannot be resized beyond its size.
    """

    def __init__(self) -> None:
        self._areas: list[tuple[mmap.mmap, weakref.ref[Any]]] = []

    def compute(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what one of ``FUNCTIONS`` returns."""
        like = _like(func, args, kwargs)
        if like is None or like.nbytes < _SMALLEST_BYTES:
            return func(*args, **kwargs)
        return func(*args, **kwargs, out=self._empty(like))

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        free = [area for area, holder in self._areas if holder() is None]
        same = [area for area in free if len(area) == like.nbytes]  # others are not kept
        area = same.pop() if same else mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE)
        holder = (ctypes.c_ubyte * like.nbytes).from_buffer(area)  # lives as long as the tensor
        self._areas = [one for one in self._areas if one[1]() is not None or one[0] in same]
        self._areas.append((area, weakref.ref(holder)))
        return torch.frombuffer(holder, dtype=like.dtype).view(like.shape)


def _like(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return a tensor of the result's shape and dtype, if that is an ordinary one on the CPU."""
    if not args or kwargs.keys() - _KNOWN or "cpu" not in str(kwargs.get("device") or "cpu"):
        return None
    creates = func in (torch.ones, torch.zeros)
    like = torch.empty(*args, **{**kwargs, "device": "meta"}) if creates else args[0]
    on_cpu = creates or getattr(like, "device", None) == torch.device("cpu")
    # Not a fake tensor or a parameter: the one has no memory, the other a gradient.
    return like if type(like) is torch.Tensor and on_cpu and not like.requires_grad else None
