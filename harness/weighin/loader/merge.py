"""Merge a LoRA adapter into a model's weights, as peft's ``merge_and_unload`` does.

Like peft, ``merge`` multiplies the adapter's two matrices for a weight in float32, and adds the
product to the weight in place. peft scales a copy of the product. ``merge`` scales the product
itself, so that the peak memory is only the model and the largest product with its two matrices.
"""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
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
        most = max((elements(one) for one, _ in modules), default=0)
        for one, module in modules:  # peft's order, which counts for tied weights
            device = module.weight.device
            if device not in memory:
                memory[device] = allocate(most, torch.float32, device)
            add(one, module.weight, memory[device], is_turned=is_turned(one, module))
    give_back_heap()


def modules_of(model: torch.nn.Module, adapter: Path) -> list[tuple[Addition, Any]]:
    """Return each product that an adapter adds, with the module whose weight the product changes.

    Raises:
        CheckpointError: for the same reasons as ``merge_adapter``.
    """
    additions = lora.read(adapter)
    if find_spec("peft"):
        additions = _chosen_by_peft(model, adapter, additions)
    return _with_modules(model, adapter, additions)


def _with_modules(
    model: torch.nn.Module, adapter: Path, additions: Mapping[str, Addition]
) -> list[tuple[Addition, Any]]:
    modules = [
        (additions[name], module) for name, module in model.named_modules() if name in additions
    ]
    others = [one.module for one, module in modules if not fits(one, module)]
    others += additions.keys() - {one.module for one, _ in modules}
    if others:
        raise lora.missing(adapter, others, type(model).__name__)
    return modules


def _chosen_by_peft(
    model: Any, adapter: Path, additions: Mapping[str, Addition]
) -> dict[str, Addition]:
    """Return what peft would add to the weights: some of ``additions``, with peft's factors.

    peft puts its layers into a copy of the model on the meta device, and into these layers stand-ins
    for the adapter's matrices.
    """
    given = {
        where.name: torch.nn.Parameter(torch.empty(where.shape, device="meta"))
        for one in additions.values()
        for where in (one.a, one.b)
    }
    try:
        from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            config = PeftConfig.from_pretrained(str(adapter))
            config.inference_mode = True
            bare = type(model)(deepcopy(model.config))
            made: Any = get_peft_model(bare, config, low_cpu_mem_usage=True)
            result: Any = set_peft_model_state_dict(made, given, low_cpu_mem_usage=True)
    except Exception as error:
        _with_modules(model, adapter, additions)  # peft's text for another model is long
        raise lora.failed(adapter, repr(error)) from error
    ignored = {name.replace(".default", "") for name in result.unexpected_keys}
    places = {id(one): name.split(".lora_")[0] for name, one in made.named_parameters()}
    chosen = {}
    for one in additions.values():
        at = places.get(id(given[one.a.name]))
        if at and at == places.get(id(given[one.b.name])):
            name = at.removeprefix("base_model.model.")
            chosen[name] = replace(
                one, module=name, scaling=made.get_submodule(at).scaling["default"]
            )
        elif not ignored >= {one.a.name, one.b.name}:
            raise lora.missing(adapter, [one.module], type(model).__name__)
    if not config.init_lora_weights and any(".lora_" in name for name in result.missing_keys):
        raise lora.failed(adapter, "it gives matrices that the file lacks random values")
    return chosen


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
