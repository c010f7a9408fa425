"""Let torchvision be imported where its build does not fit torch's: Python imports this when it starts.

PyPI's wheel of torchvision is linked against CUDA's libraries. Its models are Python code, but with a
CPU build of torch its import fails, because it registers code for two operators that its compiled
library should define. This module defines them when torchvision is imported, and implements the one
that detection models call in Python. A file of .venv-zoo, ``beneath.pth``, imports it. A
sitecustomize.py would not do: Debian's Python has one of its own, which comes first.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes that non-maximum suppression keeps, by descending score."""
    import torch

    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    order, kept = scores.argsort(descending=True, stable=True), []
    while order.numel():
        first, rest = order[0], order[1:]
        kept.append(first)
        top_left = torch.maximum(boxes[first, :2], boxes[rest, :2])
        bottom_right = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
        shared = (bottom_right - top_left).clamp(min=0).prod(1)
        order = rest[shared <= iou_threshold * (area[first] + area[rest] - shared)]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


class _Operators:
    """Finds no module: it defines the operators before the import of torchvision."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            self._define()

    def _define(self) -> None:
        import torch

        found = PathFinder.find_spec("torchvision")
        if found is None or found.origin is None:
            return
        try:
            torch.ops.load_library(Path(found.origin).with_name("_C.so"))
        except OSError:
            self._library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self._library.define(
                    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            self._library.impl("nms", _suppress, "CPU")


_OPERATORS = _Operators()  # the operators exist as long as this object
sys.meta_path.insert(0, _OPERATORS)
