"""torchvision's models where its compiled operators cannot load: beside a build of torch without CUDA.

The wheel of torchvision that PyPI has is linked against CUDA's libraries. Its models are Python, but
importing them fails, because it describes two operators that nothing has defined then. They are
defined here, and the one that detection models call is written in Python.
"""

import torch


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes that remain, by falling score: non-maximum suppression."""
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


_OPERATORS = _import()  # they are gone when this is

from torchvision import models  # noqa: E402 (only now it can be imported)

__all__ = ["models"]
