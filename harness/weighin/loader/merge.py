"""Merge a LoRA adapter into a model's weights, as peft's ``merge_and_unload`` does.

Like peft, ``merge`` multiplies the adapter's two matrices for a weight in float32, and adds the
product to the weight in place. peft scales a copy of the product. ``merge`` scales the product
itself, so that the peak memory is only the model and the largest product with its two matrices.
"""

from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from weighin.construction.skeleton import give_back_heap
from weighin.formats import lora
from weighin.formats.lora import Addition
from weighin.loader.huge_pages import TENSOR_ALIGNMENT, allocate
from weighin.loader.lazy_state import read_into, read_whole

_FEW_ELEMENTS: Final = 32 * 1024
"""The number of elements that one operation adds to a weight. It is small because torch converts 16-bit
weights to a temporary float32 tensor of as many elements."""

_LINE_ELEMENTS: Final = TENSOR_ALIGNMENT // torch.float32.itemsize


def merge_adapter(model: torch.nn.Module, adapter: Path) -> None:
    """Add an adapter's matrix products to the weights of ``model``.

    Raises:
        CheckpointError: the adapter is damaged, is not plain LoRA, or does not fit the model.
    """
    modules = modules_of(model, adapter)
    with torch.no_grad():
        for one, module in modules:
            if one.base:
                module.weight.copy_(read_whole(one.base))
        memory: dict[torch.device, torch.Tensor] = {}
        for one, module in sorted(modules, key=lambda each: -elements(each[0])):
            device = module.weight.device
            if device not in memory:
                memory[device] = allocate(elements(one), torch.float32, device)
            add(one, module.weight, memory[device], is_turned=is_turned(one, module))
    give_back_heap()


def modules_of(model: torch.nn.Module, adapter: Path) -> list[tuple[Addition, Any]]:
    """Return each product that an adapter adds, with the module whose weight the product changes.

    Raises:
        CheckpointError: for the same reasons as ``merge_adapter``.
    """
    additions = lora.read(adapter)
    modules = [
        (additions.pop(name), module) for name, module in model.named_modules() if name in additions
    ]
    others = [one.module for one, module in modules if not fits(one, module)]
    if others or additions:
        raise lora.missing(adapter, [*others, *additions], type(model).__name__)
    return modules


def fits(one: Addition, module: Any) -> bool:
    """Tell whether the adapter's product B @ A fits the weight of a linear layer or an embedding.

    The shapes must be equal. The weight and both matrices must be floats of at most 32 bits.
    """
    kinds = (torch.nn.Embedding,) if one.is_embedding else (torch.nn.Linear, _conv1d())
    if not isinstance(module, kinds):
        return False
    product = (one.b.shape[0], one.a.shape[1])
    sizes = tuple(reversed(product)) if is_turned(one, module) else product
    return (
        one.a.shape[0] == one.b.shape[1]
        and tuple(module.weight.shape) == sizes
        and (one.base is None or one.base.shape == sizes)
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(
            each.dtype.is_floating_point and each.dtype.itemsize <= 4 for each in (one.a, one.b)
        )
    )


def is_turned(one: Addition, module: Any) -> bool:
    """Tell whether the product B @ A must be transposed before it is added to the module's weight."""
    return one.is_embedding or isinstance(module, _conv1d())


def _conv1d() -> Any:
    from transformers.pytorch_utils import (
        Conv1D,  # GPT-2's linear layer, whose weight is transposed
    )

    return Conv1D


def elements(one: Addition) -> int:
    """Return the number of float32 elements that ``add`` needs for the product and both matrices."""
    rows, columns = one.b.shape[0], one.a.shape[1]
    return _aligned(rows * columns) + _aligned(prod(one.b.shape)) + _aligned(prod(one.a.shape))


def _aligned(elements: int) -> int:
    return -(-elements // _LINE_ELEMENTS) * _LINE_ELEMENTS


def add(one: Addition, weight: torch.Tensor, memory: torch.Tensor, *, is_turned: bool) -> None:
    """Add the product to a weight in place, in float32, with the same rounding as peft.

    ``memory`` holds the product and the two matrices. All products use the same memory, because the C
    library would not return the memory of each product to the kernel.
    """
    rows, columns = one.b.shape[0], one.a.shape[1]
    product = memory[: rows * columns].view(rows, columns)
    first = _aligned(rows * columns)
    b = memory[first : first + prod(one.b.shape)].view(one.b.shape)
    first += _aligned(prod(one.b.shape))
    a = memory[first : first + prod(one.a.shape)].view(one.a.shape)
    torch.mm(read_into(one.b, b), read_into(one.a, a), out=product)
    product *= one.scaling
    added = product.T if is_turned else product
    count = max(1, _FEW_ELEMENTS // weight.shape[1])
    for part, more in zip(weight.split(count), added.split(count), strict=True):
        part.add_(more.to(weight.dtype) if one.is_embedding else more)
