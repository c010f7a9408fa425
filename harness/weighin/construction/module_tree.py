"""Walk the modules and tensors of a model.

``Module.named_modules`` builds names, and passes each module through the generators of all modules
above it. ``modules_of`` is faster, and this speed matters for models with many small tensors.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ``model.modules()`` yields, each once and in the order of that method."""
    found: dict[int, nn.Module] = {}
    todo = [model]
    while todo:
        module = todo.pop()
        if id(module) not in found:
            found[id(module)] = module
            if not module._modules:
                continue
            todo += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by full name; a tied tensor appears under each of its names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return tensors | dict(model.named_buffers(remove_duplicate=False))


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of some modules; a tied tensor appears once for each name."""
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor
