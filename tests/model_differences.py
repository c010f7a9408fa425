"""Compare a model with the one that torch's own load_state_dict gives."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Place = tuple[str, torch.Tensor]
"""The path of a tensor within a model, and the tensor."""

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_MOST_ADDRESSES = 4096
"""The number of elements up to which two tensors' addresses are compared one by one."""


def torch_leaves(
    model: nn.Module, state: Mapping[str, Any], dtype: torch.dtype | None
) -> nn.Module:
    """Load a state dict into a model with torch's own code, and convert the model to ``dtype``."""
    model.load_state_dict(state, strict=True)
    return model if dtype is None else model.to(dtype)


def differences(
    model: nn.Module, reference: nn.Module, *, nan_bits: bool = True, tensors_only: bool = False
) -> list[str]:
    """Return one line for each difference between a model and the reference.

    Args:
        nan_bits: whether two NaN with different bits count as different.
        tensors_only: ignore plain values such as counters, and tensors that are lazy in the
            reference, which have no values.
    """
    found, wanted = list(_values(model)), list(_values(reference))
    if tensors_only:
        lazy = {path for path, one in wanted if nn.parameter.is_lazy(one)}
        found = [(path, one) for path, one in _tensors(found) if path not in lazy]
        wanted = _tensors(wanted)
    lines = [*_module_differences(model, reference)]
    if [path for path, _ in found] != [path for path, _ in wanted]:
        lost = {path for path, _ in wanted} - {path for path, _ in found}
        more = {path for path, _ in found} - {path for path, _ in wanted}
        return [*lines, f"places: lost {sorted(lost)}, more {sorted(more)}, or in another order"]
    for (path, one), (_, other) in zip(found, wanted, strict=True):
        is_weight = "_parameters[" in path or "_buffers[" in path
        differing = _value_differences(one, other, nan_bits, is_weight=is_weight)
        lines += [f"{path}: {what}" for what in differing]
    mine, theirs = _tensors(found), _tensors(wanted)
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return lines
    lines += _set_differences("the same object", _same_objects(mine), _same_objects(theirs))
    lines += _set_differences("memory", _overlaps(mine), _overlaps(theirs))
    lines += [f"gradient of {line}" for line in _gradients(mine, theirs, nan_bits)]
    return lines


def state_differences(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, nan_bits: bool = True
) -> list[str]:
    """Return one line for each tensor of two state dicts that is lost, more, of another kind or value."""
    lines = [f"lost {key}" for key in wanted.keys() - found.keys()]
    lines += [f"more: {key}" for key in found.keys() - wanted.keys()]
    for key in found.keys() & wanted.keys():
        one, other = found[key], wanted[key]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            kinds = [f"{each.dtype} {tuple(each.shape)}" for each in (one, other)]
            lines.append(f"{key} is {', not '.join(kinds)}")
        elif not same_bytes(one, other, nan_bits=nan_bits):
            lines.append(f"{key}: other values")
    return lines


def ties(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, for each further name of the same memory, the first name."""
    first: dict[int, str] = {}
    names = {
        key: first.setdefault(one.data_ptr(), key) for key, one in state.items() if one.numel()
    }
    return {key: name for key, name in names.items() if name != key}


def seed(number: int) -> None:
    """Seed the CPU's random generator; torch.manual_seed logs a traceback for each other device."""
    torch.default_generator.manual_seed(number)


def outcome(run: Callable[[], Any]) -> Any:
    """Return a function's result, or the type of the exception that it raises."""
    try:
        return run()
    except Exception as error:
        return type(error)


def output_differences(found: Any, wanted: Any, *, exact: bool = False) -> list[str]:
    """Return one line for each difference between two outputs that is larger than rounding errors.

    Rounding differs because the weights' addresses decide which kernel computes the output;
    ``exact`` allows for none.
    """
    mine, theirs = list(_inside("output", found)), list(_inside("output", wanted))
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return [f"output: {found!r}, not {wanted!r}"]
    return [
        f"{path}: {one!r}, not {other!r}"
        for (path, one), (_, other) in zip(mine, theirs, strict=True)
        if not _close(one, other, exact)
    ]


def _close(one: Any, other: Any, exact: bool) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return repr(one) == repr(other)
    if (one.dtype, one.shape, one.requires_grad) != (other.dtype, other.shape, other.requires_grad):
        return False
    if exact:
        return same_bytes(one, other)
    most = {2: 0.05, 1: 1.0}.get(one.itemsize, 1e-4)
    mine, theirs = one.detach().double(), other.detach().double()
    return torch.allclose(mine, theirs, rtol=most, atol=most, equal_nan=True)


def _module_differences(model: nn.Module, reference: nn.Module) -> Iterator[str]:
    mine = dict(model.named_modules(remove_duplicate=False))
    theirs = dict(reference.named_modules(remove_duplicate=False))
    if list(mine) != list(theirs):
        yield f"modules: {list(mine)}, not {list(theirs)}"
        return
    first: dict[int, str] = {}
    twin: dict[int, str] = {}
    for name, wanted in theirs.items():
        found = mine[name]
        if first.setdefault(id(wanted), name) != twin.setdefault(id(found), name):
            yield f"module {name!r}: shared otherwise"
        if _name(type(found)) != _name(type(wanted)):  # each parametrisation makes a new class
            yield f"module {name!r}: a {_name(type(found))}, not a {_name(type(wanted))}"
        if found.training != wanted.training:
            yield f"module {name!r}: training is {found.training}"
        if found._non_persistent_buffers_set != wanted._non_persistent_buffers_set:
            yield f"module {name!r}: other non-persistent buffers"
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            if len(getattr(found, kind)) != len(getattr(wanted, kind)):
                yield f"module {name!r}: other {kind}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _values(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each parameter, buffer and plain attribute of all modules, with its path."""
    for name, module in root.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for leaf, value in getattr(module, kind).items():
                yield f"{name}{kind}[{leaf}]", value
        for leaf, value in vars(module).items():
            if leaf not in _OF_EVERY_MODULE:
                yield from _inside(f"{name}.{leaf}", value)
    for key, value in _state(root):
        yield from _inside(f"state_dict()[{key!r}]", value)


def _state(root: nn.Module) -> Iterator[tuple[str, Any]]:
    try:
        state = root.state_dict(keep_vars=True)
    except Exception as error:  # for example from a lazy module's hooks
        yield "", type(error).__name__
        return
    yield from state.items()
    yield "_metadata", getattr(state, "_metadata", None)


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _inside(f"{path}[{number}]", one)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _inside(f"{path}[{key!r}]", one)
    elif isinstance(value, torch.Tensor | int | float | complex | str | type(None) | type):
        yield path, value
    elif not isinstance(value, nn.Module) and not callable(value):
        yield path, type(value).__name__


def _tensors(values: list[tuple[str, Any]]) -> list[Place]:
    return [
        (path, value)
        for path, value in values
        if isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)
    ]


def _value_differences(
    one: Any, other: Any, nan_bits: bool, *, is_weight: bool = False
) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"a {type(one).__name__}, not a {type(other).__name__}"
    elif not isinstance(other, torch.Tensor):
        if repr(one) != repr(other):  # NaN equals itself there
            yield f"{one!r}, not {other!r}"
    elif not nn.parameter.is_lazy(other):
        for what in ("dtype", "device", "shape", "requires_grad", "is_leaf"):
            if getattr(one, what) != getattr(other, what):
                yield f"{what} is {getattr(one, what)}, not {getattr(other, what)}"
        if one.stride() != other.stride():
            yield f"stride is {one.stride()}, not {other.stride()}"
        yield from _attribute_differences(one, other, nan_bits)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return
        if one.is_meta:
            if is_weight:  # from_pretrained, too, leaves a plain attribute there
                yield "is on the meta device"
        elif not same_bytes(one, other, nan_bits=nan_bits):
            yield "other values"


def _attribute_differences(one: torch.Tensor, other: torch.Tensor, nan_bits: bool) -> Iterator[str]:
    mine, theirs = list(_inside("", vars(one))), list(_inside("", vars(other)))
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        yield f"attributes are {sorted(vars(one))}, not {sorted(vars(other))}"
        return
    for (path, value), (_, wanted) in zip(mine, theirs, strict=True):
        yield from (f"{path}: {what}" for what in _value_differences(value, wanted, nan_bits))


def same_bytes(one: torch.Tensor, other: torch.Tensor, *, nan_bits: bool = True) -> bool:
    """Tell whether two tensors of one shape and dtype have the same bytes."""
    mine, theirs = (_flat(each).view(torch.uint8) for each in (one, other))
    if torch.equal(mine, theirs):
        return True
    kind = other.dtype.to_real() if other.dtype.is_complex else other.dtype
    if nan_bits or not kind.is_floating_point:
        return False
    size = kind.itemsize
    equal = (mine.view(-1, size) == theirs.view(-1, size)).all(1)
    nan = mine.view(kind).double().isnan() & theirs.view(kind).double().isnan()
    return bool((equal | nan).all())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1)


def _set_differences(what: str, found: set[Any], wanted: set[Any]) -> list[str]:
    lines = [f"{what} is shared no more by {one}" for one in sorted(wanted - found)]
    return lines + [f"{what} is shared now by {one}" for one in sorted(found - wanted)]


def _gradients(mine: list[Place], theirs: list[Place], nan_bits: bool) -> Iterator[str]:
    """Yield each parameter whose gradient differs after a backward pass, for example by a hook."""
    for (path, one), (_, other) in zip(mine, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
            continue
        for what in _value_differences(_gradient(one), _gradient(other), nan_bits):
            yield f"{path}: {what}"


def _gradient(tensor: torch.Tensor) -> Any:
    """Return a parameter's gradient after a backward pass with its hooks, or an exception's type."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return None
    kept, tensor.grad = tensor.grad, None
    weights = torch.arange(1.0, tensor.numel() + 1).reshape(tensor.shape).to(tensor.dtype)
    raised = outcome(lambda: tensor.backward(weights))
    gradient, tensor.grad = tensor.grad, kept
    return raised or gradient


# Tensors that share memory ----------------------------------------------------------------------------


def _same_objects(places: list[Place]) -> set[tuple[str, ...]]:
    """Return each group of paths that refer to the same tensor object."""
    groups: dict[int, list[str]] = {}
    for path, tensor in places:
        groups.setdefault(id(tensor), []).append(path)
    return {tuple(paths) for paths in groups.values() if len(paths) > 1}


def _overlaps(places: list[Place]) -> set[tuple[str, str, int]]:
    """Return each pair of tensors that overlap, with the distance of their starts in bytes."""
    held = {id(one): (path, one) for path, one in reversed(places) if one.numel()}
    there = [(path, one) for path, one in held.values() if not one.is_meta]
    spans = [
        (one.data_ptr(), one.data_ptr() + _extent_bytes(one), path, one) for path, one in there
    ]
    spans.sort(key=lambda span: span[:3])
    found = set()
    for number, (start, end, path, one) in enumerate(spans):
        for begin, _, other_path, other in spans[number + 1 :]:
            if begin >= end:
                break
            if _meet(one, other):
                (first, at), (second, then) = sorted([(path, start), (other_path, begin)])
                found.add((first, second, then - at))
    return found


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    if max(one.numel(), other.numel()) > _MOST_ADDRESSES:
        return True
    return not _addresses(one).isdisjoint(_addresses(other))


def _addresses(tensor: torch.Tensor) -> set[int]:
    starts = {tensor.data_ptr()}
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        starts = {at + n * step * tensor.itemsize for at in starts for n in range(size)}
    return {start + n for start in starts for n in range(tensor.itemsize)}


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
