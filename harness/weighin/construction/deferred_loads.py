"""Choose the loads that can be executed in any order; drop loads whose values others overwrite."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from weighin.construction.tensor_memory import extent, is_dense, is_whole_storage


class DeferredLoad(NamedTuple):
    """A deferred copy to ``target`` from a promised tensor, whose values are still in a file.

    Attributes:
        source: a view of the promised tensor; None for the whole tensor.
        promise: the source of the values, as given to ``WriteLog.promise`` or ``WriteLog.load``.
    """

    target: torch.Tensor
    source: torch.Tensor | None
    promise: Any


@dataclass(slots=True)
class IndependentLoads:
    """Loads that can be executed in any order, chosen from the last recorded load to the first.

    Attributes:
        whole: the storages that a load replaces completely.
        reached: the byte ranges that loads span, with or without gaps, in storages not in ``whole``.
        filled: the byte ranges that loads fill without gaps, in storages not in ``whole``.
    """

    chosen: list[DeferredLoad] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    reached: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    filled: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def covers(self, key: int, start: int, end: int) -> bool:
        """Tell whether the chosen loads fill every byte from ``start`` to ``end`` of a storage."""
        for first, last in sorted(self.filled.get(key, ())):
            if first > start:
                return False
            start = max(start, last)
        return start >= end

    def meets(self, key: int, start: int, end: int) -> bool:
        """Tell whether a chosen load may fill any byte from ``start`` to ``end`` of a storage."""
        return any(first < end and start < last for first, last in self.reached.get(key, ()))

    def add(self, key: int, load: DeferredLoad) -> bool:
        """Add a load that was recorded before the chosen loads; return False, without adding the
        load, if it must also be executed before them.

        If the chosen loads overwrite the load's whole target, ``add`` drops the load and returns True.
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
