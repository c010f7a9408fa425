"""Describe tensors of many shapes, dtypes and memory layouts as recipes, and build a module of them."""

from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import nn

FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn")
DTYPES = (*FLOATS, "complex64", "int64", "int8", "uint8", "bool")
LAYOUTS = ("contiguous", "transposed", "gaps", "offset", "flat", "channels_last", "expanded")
NAMES = ("a", "weight", "0", "with space", "a/b", "é", "x-y", "_hidden", "norm", "W" * 40)
SHAPES = ((3,), (2, 3), (), (0, 2), (1, 4), (2, 2, 3), (1, 2, 3, 2), (5, 0))

_FLAT_ELEMENTS = 48


Role = Literal["parameter", "buffer", "temporary", "plain"]


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor of a module. With ``flat`` it is a view, at ``offset``, of a tensor that others share."""

    role: Role = "parameter"
    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    layout: str = "contiguous"
    values: Literal["random", "constant", "range"] = "random"
    offset: int = 0


class Tensors(nn.Module):
    """A module with the tensors of some recipes, as parameters, buffers and plain attributes."""

    def __init__(self, recipes: tuple[TensorRecipe, ...]) -> None:
        super().__init__()
        flats: dict[str, torch.Tensor] = {}
        for number, recipe in enumerate(recipes):
            tensor, name = made(recipe, flats), f"t{number}"
            if recipe.role == "parameter":
                differentiable = tensor.is_floating_point() or tensor.is_complex()
                setattr(self, name, nn.Parameter(tensor, requires_grad=differentiable))
            elif recipe.role == "plain":
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=recipe.role == "buffer")


def made(recipe: TensorRecipe, flats: dict[str, torch.Tensor]) -> torch.Tensor:
    shape, size = recipe.shape, torch.Size(recipe.shape).numel()
    if recipe.layout == "flat":
        if recipe.dtype not in flats:
            flats[recipe.dtype] = _values((_FLAT_ELEMENTS,), recipe)
        tensor = flats[recipe.dtype][recipe.offset : recipe.offset + size].view(shape)
    elif recipe.layout == "offset":
        tensor = _values((size + 3,), recipe)[3:].view(shape)
    elif recipe.layout == "transposed":
        tensor = _values(shape[::-1], recipe).permute(tuple(range(len(shape)))[::-1])
    elif recipe.layout == "gaps" and shape:
        tensor = _values((*shape[:-1], 2 * shape[-1]), recipe)[..., ::2]
    elif recipe.layout == "expanded" and shape:
        tensor = _values((1, *shape[1:]), recipe).expand(shape)
    else:
        tensor = _values(shape, recipe)
        if recipe.layout == "channels_last" and len(shape) == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _values(shape: tuple[int, ...], recipe: TensorRecipe) -> torch.Tensor:
    dtype = getattr(torch, recipe.dtype)
    if recipe.values == "range":
        return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if recipe.values == "constant":
        return nn.init.constant_(torch.empty(shape), 1).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def fill(tensor: torch.Tensor, generator: torch.Generator, *, specials: bool) -> None:
    """Fill a tensor with random values in place, including NaN and infinities if ``specials``."""
    if not tensor.numel():
        return
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    shape = tuple(1 if step == 0 else size for size, step in sides)
    once = tensor.detach().as_strided(shape, tensor.stride(), tensor.storage_offset())
    if tensor.is_floating_point() or tensor.is_complex():
        values = torch.randn(shape, generator=generator)
        if specials and values.numel():
            for number, special in enumerate((float("nan"), float("inf"), -0.0, 1e-42)):
                values.view(-1)[number * 7 % values.numel()] = special
    else:
        values = torch.randint(
            0, 2 if tensor.dtype == torch.bool else 100, shape, generator=generator
        )
    once.copy_(values)


def tensor_recipes() -> st.SearchStrategy[TensorRecipe]:
    return st.builds(
        TensorRecipe,
        role=st.sampled_from(("parameter", "buffer", "parameter", "buffer", "temporary", "plain")),
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(("float32", *DTYPES)),
        layout=st.one_of(st.sampled_from(LAYOUTS[:-1]), st.sampled_from(LAYOUTS)),
        values=st.sampled_from(("random", "constant", "range")),
        offset=st.integers(0, 24),
    )
