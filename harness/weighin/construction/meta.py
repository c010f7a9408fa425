"""Move a model's tensors from the meta device to CPU memory, so that the model can be loaded."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def real_memory(model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Move parameters and persistent buffers from the meta device to uninitialised CPU memory.

    A tensor stays the same Python object, so that all references to the tensor stay valid. Only a
    tensor with weak references is replaced by a new object. If the body of the ``with`` statement
    raises, the tensors return to the meta device.

    Args:
        dtypes: maps tensor names to new dtypes; a tensor without an entry keeps its dtype.
    """
    places: dict[int, tuple[torch.Tensor, list[tuple[torch.nn.Module, str]]]] = {}
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
                continue
            if leaf not in module._non_persistent_buffers_set:
                places.setdefault(id(tensor), (tensor, []))[1].append((module, leaf))
                names.setdefault(id(tensor), f"{prefix}.{leaf}" if prefix else leaf)
    undo: list[Callable[[], None]] = []
    for key, (tensor, owners) in places.items():
        real = _real(tensor, dtypes.get(names[key], tensor.dtype))
        undo.append(_put(tensor, real, owners))
    try:
        yield
    except BaseException:
        for restore in undo:
            restore()
        raise


def _put(
    old: torch.Tensor, new: torch.Tensor, owners: list[tuple[torch.nn.Module, str]]
) -> Callable[[], None]:
    """Replace the tensor ``old`` in its modules by ``new``; return a function that undoes this."""

    def put(tensor: torch.Tensor) -> None:
        for module, leaf in owners:
            setattr(module, leaf, tensor)

    if weakref.getweakrefs(old):  # as those of nn.RNN, which updates them in __setattr__
        put(new)
        return lambda: put(old)
    torch.utils.swap_tensors(old, new)
    return lambda: torch.utils.swap_tensors(old, new)


def _real(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    if not isinstance(tensor, torch.nn.Parameter):
        return data
    real = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    return real
