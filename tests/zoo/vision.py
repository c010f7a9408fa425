"""Import torchvision's models even if its compiled operators cannot load, as with a CPU build of torch.

PyPI's wheel of torchvision is linked against CUDA's libraries. Its models are Python code, but without
the compiled library their import fails, because torchvision registers code for two operators that are
then undefined. This module defines them, and implements the one that detection models call in Python.
"""

import torch


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes that non-maximum suppression keeps, by descending score."""
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


def _define_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _suppress, "CPU")
    return library


def _import() -> torch.library.Library | None:
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    else:
        return None if torchvision.extension._has_ops() else _define_operators()
    library = _define_operators()
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None
    return library


_OPERATORS = _import()  # the operators exist as long as this object

from torchvision import models  # noqa: E402 (only after the operators are defined)

__all__ = ["models"]
