"""Choose the loads that replace the values of tensors, and can be executed together in any order."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from weighin.construction.tensor_memory import extent, is_dense, is_whole_storage


class DeferredLoad(NamedTuple):
    """A deferred copy from a promised tensor, which has no values yet, to ``target``.

    ``source`` is a view of the promised tensor, or None for the whole of it. ``promise`` is the
    argument ``source`` with which ``WriteLog.promise`` was called for the promised tensor.
    """

    target: torch.Tensor
    source: torch.Tensor | None
    promise: Any


@dataclass(slots=True)
class IndependentLoads:
    """Loads that can be executed together, in any order, chosen from the last one to the first.

    ``whole`` has the storages that the loads replace completely. For all other storages,
    ``reached`` has the byte ranges of storages that the loads span; ``filled`` has the ranges that
    the loads fill completely.
    """

    chosen: list[DeferredLoad] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    reached: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    filled: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def covers(self, key: int, start: int, end: int) -> bool:
        """Tell whether the loads fill every byte from ``start`` to ``end`` of a storage."""
        for first, last in sorted(self.filled.get(key, ())):
            if first > start:
                return False
            start = max(start, last)
        return start >= end

    def meets(self, key: int, start: int, end: int) -> bool:
        """Tell whether a load may fill any byte from ``start`` to ``end`` of a storage."""
        return any(first < end and start < last for first, last in self.reached.get(key, ()))

    def add(self, key: int, load: DeferredLoad) -> bool:
        """Add an earlier load; return False if it must be executed before these loads.

        The load is dropped if these loads fill its target completely.
        """
        if key not in self.reached and is_whole_storage(load.target):
            self.chosen.append(load)
            self.whole.add(key)
            return True
        start, end = extent(load.target)
        if self.covers(key, start, end):
            return True
        if self.meets(key, start, end):
            return False
        self.chosen.append(load)
        self.reached.setdefault(key, []).append((start, end))
        if is_dense(load.target):
            self.filled.setdefault(key, []).append((start, end))
        return True
