"""Find tensors that share memory, as the same object or as overlapping views."""

import torch

Place = tuple[str, torch.Tensor]
"""The path of a tensor within a model, and the tensor."""

_MOST_ADDRESSES = 4096
"""The number of elements up to which two tensors' addresses are compared one by one."""


def same_objects(places: list[Place]) -> set[tuple[str, ...]]:
    """Return each group of paths that refer to the same tensor object."""
    groups: dict[int, list[str]] = {}
    for path, tensor in places:
        groups.setdefault(id(tensor), []).append(path)
    return {tuple(paths) for paths in groups.values() if len(paths) > 1}


def overlaps(places: list[Place]) -> set[tuple[str, str, int]]:
    """Return each pair of tensors that overlap, with the distance of their starts in bytes."""
    held = {id(one): (path, one) for path, one in reversed(places) if one.numel()}
    spans = sorted(
        (
            (one.data_ptr(), one.data_ptr() + _extent_bytes(one), path, one)
            for path, one in held.values()
            if not one.is_meta
        ),
        key=lambda span: span[:3],
    )
    found = set()
    for number, (start, end, path, one) in enumerate(spans):
        for begin, _, other_path, other in spans[number + 1 :]:
            if begin >= end:
                break
            if _meet(one, other):
                pair = sorted([(path, start), (other_path, begin)])
                found.add((pair[0][0], pair[1][0], pair[1][1] - pair[0][1]))
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
