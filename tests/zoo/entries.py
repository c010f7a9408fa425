"""List the models to test, and build, fill and call one of them."""

import copy
from dataclasses import dataclass, field
from typing import Any

import builders
import torch
from torch import nn
from torch.utils._pytree import tree_map

FITS_BYTES = 400 * 1024**2  # the largest size of a model's parameters
_FEW_BYTES = 20 * 1024**2  # up to this size, a model is tested in every way
_SURE = 0.1  # the score threshold of detections, which an untrained model rarely reaches
_DETECTION_PIXELS = 96  # detection models would resize every image to 800 pixels


@dataclass(frozen=True, slots=True)
class Case:
    """One model: ``builder`` is a function of ``builders``."""

    label: str
    family: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Return a new model with its constructor's values after this seed."""
        torch.manual_seed(seed)
        model: nn.Module = getattr(builders, self.builder)(**self.kwargs)
        return model

    def inputs(self, dtype: torch.dtype | None = None) -> Any:
        """Return the arguments of a forward pass, with floating-point tensors of ``dtype``."""

        def converted(one: Any) -> Any:
            is_float = isinstance(one, torch.Tensor) and one.is_floating_point()
            return one.to(dtype) if is_float and dtype else one

        return tree_map(converted, builders.forward_input(self.builder, **self.kwargs))

    def donor(self) -> nn.Module:
        """Return the model to save, whose values differ from those of ``build(0)``."""
        model = self.build(1)
        if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
            args, kwargs = self.inputs()
            model(*args, **kwargs)
        torch.manual_seed(2)
        seen: set[int] = set()
        for tensor in model.state_dict().values():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                _disturb(tensor)
        return model


def _disturb(tensor: torch.Tensor) -> None:
    """Change a tensor's values a little, so that the model's output stays meaningful."""
    if tensor.is_floating_point() and tensor.numel():
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        # On average not larger than before, so that a deep model's output stays finite.
        noise = torch.rand_like(flat)
        flat.mul_(0.95).add_(noise.sub_(0.5), alpha=0.001)
    elif tensor.dtype == torch.int64 and tensor.ndim == 0:
        tensor.fill_(7)  # a batch norm's number of batches


def bytes_of(model: nn.Module) -> int:
    return sum(
        t.nbytes for t in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(t)
    )


def is_small(model: nn.Module) -> bool:
    """Tell whether a model is small enough to be tested in every way."""
    return bytes_of(model) <= _FEW_BYTES


def make_ready(model: nn.Module) -> nn.Module:
    """Set a detection model to small images and few detections, so that its forward pass is short."""
    detection: Any = model
    if hasattr(model, "score_thresh"):
        detection.score_thresh = _SURE
    transform: Any = getattr(model, "transform", None)
    if hasattr(transform, "min_size") and hasattr(transform, "max_size"):
        transform.min_size, transform.max_size = (_DETECTION_PIXELS,), _DETECTION_PIXELS
    return model


def twin(model: nn.Module, case: Case) -> nn.Module:
    """Return another model equal to ``model``, which ``case.build(0)`` built; copy a large one."""
    return case.build(0) if is_small(model) else copy.deepcopy(model)


def module_cases() -> list[Case]:
    """Return a case for each module of torch's tests and each set of constructor arguments."""
    return [
        Case(f"{name}[{number}]", "module_db", "from_module_db", {"name": name, "number": number})
        for name in module_names()
        for number in range(len(builders.module_inputs(name)))
    ]


def pair_cases() -> list[Case]:
    """Return a case for the first module of each kind, under two names."""
    return [
        Case(f"pair of {name}", "pair", "pair_of", {"name": name, "number": 0})
        for name in module_names()
    ]


def module_names() -> list[str]:
    from torch.testing._internal.common_modules import module_db

    return list(dict.fromkeys(info.name for info in module_db))


def vision_cases() -> list[Case]:
    """Return a case for every architecture of torchvision up to ``FITS_BYTES``, by its metadata."""
    models = builders.vision_models()

    def size(name: str) -> int:
        weights = next(iter(models.get_model_weights(name)))
        return int(weights.meta["num_params"]) * 4

    names = sorted(models.list_models(), key=size)
    return [Case("small_vit", "torchvision", "small_vit")] + [
        Case(name, "torchvision", "from_torchvision", {"name": name})
        for name in names
        if size(name) <= FITS_BYTES
    ]
