"""In what a loaded model differs from a reference: values, dtypes, strides, ties, attributes, outputs."""

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_OWN = ("_parameters", "_buffers", "_modules")


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Return in words in what ``model`` is not what ``reference`` is; nothing where it is the same."""
    found = []
    ours, theirs = named_tensors(model), named_tensors(reference)
    if list(ours) != list(theirs):
        odd = sorted(ours.keys() ^ theirs.keys())
        found.append(f"other tensors: {', '.join(odd[:3]) or 'in another order'}")
    for name in ours.keys() & theirs.keys():
        found += [f"{name}: {what}" for what in _unlike(ours[name], theirs[name])]
    if not found:
        found += _sharing(ours, theirs)
    modules = dict(reference.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in modules:
            found.append(f"module {name} is not in the reference")
        else:
            found += [
                f"{name or 'model'}{what}"
                for what in _attributes(module, modules[name], ours, theirs)
            ]
    return found


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, tied ones under each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype hold the same bytes."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def _unlike(one: torch.Tensor, other: torch.Tensor) -> Iterator[str]:
    lazy = [isinstance(t, nn.parameter.UninitializedTensorMixin) for t in (one, other)]
    if type(one) is not type(other):
        yield f"a {type(one).__name__}, not a {type(other).__name__}"
    if any(lazy):
        return
    traits = ("dtype", "shape", "device", "requires_grad", "is_leaf", "layout", "grad")
    for trait in (*traits, "stride"):
        mine, right = getattr(one, trait), getattr(other, trait)
        if trait == "stride":
            mine, right = mine(), right()
        if mine != right:
            yield f"{trait} {mine}, not {right}"
            if trait in ("dtype", "shape", "device"):
                return
    if not same_bits(one, other):
        yield "other values"


def _sharing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> Iterator[str]:
    for what, groups in (("the same object", _identical), ("memory", _overlapping)):
        mine, right = groups(ours), groups(theirs)
        if mine != right:
            odd = sorted(map(sorted, mine ^ right))[0]
            yield f"{', '.join(odd[:3])}: {what} only in {'this' if frozenset(odd) in mine else 'the reference'}"


def _identical(tensors: Mapping[str, torch.Tensor]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> set[frozenset[str]]:
    """Return the names whose stretches of memory overlap, directly or through others."""
    stretches = []
    for name, t in tensors.items():
        if not isinstance(t, nn.parameter.UninitializedTensorMixin) and t.numel():
            last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
            stretches.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), name))
    groups: list[set[str]] = []
    end = 0
    for start, stop, name in sorted(stretches):
        if start < end:
            groups[-1].add(name)
        else:
            groups.append({name})
        end = max(end, stop)
    return {frozenset(group) for group in groups if len(group) > 1}


def _attributes(
    module: nn.Module,
    reference: nn.Module,
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
) -> Iterator[str]:
    if type(module) is not type(reference):
        yield f" is a {type(module).__name__}, not a {type(reference).__name__}"
    for kind in _OWN:
        mine, right = list(vars(module)[kind]), list(vars(reference)[kind])
        if mine != right:
            yield f"{kind} are {mine}, not {right}"
    by_id = [{id(tensor): name for name, tensor in names.items()} for names in (ours, theirs)]
    mine, right = ({k: v for k, v in vars(m).items() if k not in _OWN} for m in (module, reference))
    seen: set[int] = set()
    yield from _values(mine, right, by_id, "", seen)


def _values(
    one: Any, other: Any, by_id: list[dict[int, str]], path: str, seen: set[int]
) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"{path}: a {type(one).__name__}, not a {type(other).__name__}"
    elif isinstance(one, torch.Tensor):
        names = by_id[0].get(id(one)), by_id[1].get(id(other))
        if names[0] != names[1]:
            yield f"{path} is {names[0] or 'no parameter'}, not {names[1] or 'no parameter'}"
        elif names[0] is None:
            yield from (f"{path}: {what}" for what in _unlike(one, other))
    elif isinstance(one, weakref.ref):
        yield from _values(one(), other(), by_id, path, seen)
    elif isinstance(one, Mapping | list | tuple):
        yield from _members(one, other, by_id, path, seen)
    elif isinstance(one, functools.partial):
        parts = [(p.func, p.args, p.keywords) for p in (one, other)]
        yield from _values(*parts, by_id, path, seen)
    elif type(one).__eq__ is not object.__eq__:
        if one != other and repr(one) != repr(other):
            yield f"{path} is {one!r}, not {other!r}"
    elif hasattr(one, "__dict__") and not callable(one) and id(one) not in seen:
        seen.add(id(one))
        yield from _values(vars(one), vars(other), by_id, path, seen)


def _members(
    one: Any, other: Any, by_id: list[dict[int, str]], path: str, seen: set[int]
) -> Iterator[str]:
    if not isinstance(one, Mapping):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if list(one) != list(other):
        yield f"{path} has other keys or another length"
        return
    for key in one:
        yield from _values(one[key], other[key], by_id, f"{path}.{key}", seen)


def output_of(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Return the tensors of one forward pass in evaluation mode, or which error it raised."""
    args, kwargs = inputs
    torch.manual_seed(7)
    try:
        with torch.no_grad():
            return list(_leaves(model.eval()(*args, **kwargs)))
    except Exception as error:  # the reference must raise the same
        return [f"{type(error).__name__}"]


def unlike_outputs(one: list[Any], other: list[Any]) -> str:
    """Return in words in what two outputs differ; nothing where they are the same."""
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
