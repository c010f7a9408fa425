"""Walk the tensors of a model, tell which memory they use and share, and tie or move them."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ``model.modules()`` yields, each once and in the order of that method."""
    # faster than model.modules() for a model with many small tensors
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


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage; 0 if the tensor has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, ValueError):  # a sparse tensor, or a tensor of a lazy module
        return 0


def use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors use the storage of ``tensor``, ``tensor`` itself included."""
    storage = tensor.untyped_storage()  # this Python object adds one reference
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and the end of a tensor's elements within its storage, in bytes."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    if not tensor.numel():
        return start * size, start * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill one range of its storage without gaps, in any order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def is_whole_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is contiguous and takes up its whole storage."""
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return, for each tied parameter or persistent buffer, the list of its two or more names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                groups.setdefault(id(buffer), []).append(f"{prefix}.{leaf}" if prefix else leaf)
    return [names for names in groups.values() if len(names) > 1]


def retie(model: torch.nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group share the tensor of the group's first name again.

    Call ``retie`` after ``to_empty`` from the meta device or ``load_state_dict(assign=True)``,
    which silently untie weights.
    """
    for first, *others in groups:
        owner, _, attribute = first.rpartition(".")
        tensor = getattr(model.get_submodule(owner), attribute)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, tensor)


def assign(
    model: torch.nn.Module, state: dict[str, torch.Tensor], device: torch.device | str
) -> None:
    """Make a state dict's tensors the model's tensors, on ``device`` and in the model's dtypes.

    Tied weights stay tied. ``assign`` replaces each tensor in ``state`` by the converted tensor, so that
    the original tensor is freed before the next one is converted.
    """
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        kind = dtypes.get(name, tensor.dtype)
        state[name] = tensor.to(device, kind)  # copies only if device or dtype differs
    tied = tied_names(model)
    share_missing(state, tied)
    model.load_state_dict(state, assign=True)
    retie(model, tied)


def share_missing(state: dict[str, torch.Tensor], groups: list[list[str]]) -> None:
    """Add the missing names of tied weights to a state dict; each group has the names of one tensor.

    Formats that cannot store shared tensors, such as safetensors, store only one name of each group.
    """
    for names in groups:
        present = [name for name in names if name in state]
        state |= {name: state[present[0]] for name in names if present and name not in state}


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
