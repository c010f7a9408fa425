"""Which tensors share memory: as one object, or as overlapping views."""

import torch

Place = tuple[str, torch.Tensor]
"""Where a tensor is held, as a path, and the tensor."""

_MOST_ADDRESSES = 4096
"""Elements up to which two tensors' addresses are compared one by one."""


def same_objects(places: list[Place]) -> set[tuple[str, ...]]:
    """Return the groups of paths that hold one and the same tensor."""
    groups: dict[int, list[str]] = {}
    for path, tensor in places:
        groups.setdefault(id(tensor), []).append(path)
    return {tuple(paths) for paths in groups.values() if len(paths) > 1}


def overlaps(places: list[Place]) -> set[tuple[str, str, int]]:
    """Return the pairs of tensors that have bytes in common, and how far their starts are apart."""
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
