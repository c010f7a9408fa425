"""Build models of other projects by name: the modules of torch's own tests, and torchvision's models.

Each function is a builder for a model ``builders:NAME``. No function sets a random seed: callers that
need equal values set one first.
"""

import copy
import inspect
from functools import cache
from typing import Any

import torch
from torch import nn

_STILL = {"vit": 224, "maxvit": 224, "inception": 96, "quantized_inception": 96, "raft": 128}
_VIDEO = {"s3d": (16, 224), "mvit": (16, 224), "r3d": (4, 64), "mc3": (4, 64), "r2plus1d": (4, 64),
          "swin3d": (4, 64)}  # fmt: skip
_PIXELS = 64  # of images for models that are not named above


def vision_models() -> Any:
    """Return torchvision's models, also where its build does not fit torch's."""
    import torchvision.ops.boxes

    if not torchvision.extension._has_ops():
        torchvision.ops.boxes._assert_has_ops = lambda: None
    return torchvision.models


@cache
def _info(name: str) -> Any:
    from torch.testing._internal.common_modules import module_db

    return next(info for info in module_db if info.name == name)


@cache
def module_inputs(name: str) -> list[Any]:
    """Return one input of torch's tests for each set of constructor arguments of this module."""
    info = _info(name)
    found: dict[str, Any] = {}
    with torch.random.fork_rng():
        for training in (False, True):
            torch.manual_seed(0)
            for one in info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
            ):
                ways = one.constructor_input
                found.setdefault(repr((ways.args, ways.kwargs)), one)
    return list(found.values())


def from_module_db(name: str, number: int) -> nn.Module:
    """Return a module of torch's own tests, constructed with one of their sets of arguments."""
    # Tensors among the arguments become the module's own, so each module gets copies.
    ways = copy.deepcopy(module_inputs(name)[number].constructor_input)
    module: nn.Module = _info(name).module_cls(*ways.args, **ways.kwargs)
    return module


class Pair(nn.Module):
    """A module under two names, which ties all its tensors, and a non-persistent buffer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first = module
        self.again = module
        self.register_buffer("positions", torch.arange(1.0, 12.0), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.first(*args, **kwargs)


def pair_of(name: str, number: int) -> nn.Module:
    return Pair(from_module_db(name, number))


def from_torchvision(name: str) -> nn.Module:
    """Return a model of torchvision with its constructor's values."""
    builder = vision_models().get_model_builder(name)
    known = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "quantize": False}
    model: nn.Module = builder(**{key: options[key] for key in options if key in known})
    return model


def small_vit() -> nn.Module:
    """Return a vision transformer of torchvision, small enough for tests."""
    model: nn.Module = vision_models().VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128
    )
    return model


def forward_input(kind: str, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of one forward pass of the builder ``kind``; None if there are none."""
    if kind in ("from_module_db", "pair_of"):
        given = module_inputs(kwargs["name"])[kwargs["number"]].forward_input
        return None if given is None else copy.deepcopy((tuple(given.args), dict(given.kwargs)))
    if kind == "small_vit":
        return (_image(32),), {}
    return _vision_input(kwargs["name"])


def _vision_input(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    family = vision_models().get_model_builder(name).__module__.split(".")[2]
    if family == "video":
        frames, pixels = next(size for key, size in _VIDEO.items() if name.startswith(key))
        return (_image(frames, pixels, pixels),), {}
    still = next((size for key, size in _STILL.items() if name.startswith(key)), _PIXELS)
    if family == "optical_flow":
        return (_image(still), _image(still).flip(-1)), {}
    return (_image(still),), {}


def _image(*sizes: int) -> torch.Tensor:
    shape = (1, 3, *(sizes if len(sizes) > 1 else sizes * 2))
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


def example_inputs(**kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return the model's inputs for a worker; nothing if they are not all tensors."""
    kind = "from_module_db" if "number" in kwargs else "from_torchvision"
    given = forward_input(kind, **kwargs) if kwargs else ((_image(32),), {})
    if given is None or given[1] or not all(isinstance(one, torch.Tensor) for one in given[0]):
        return ()
    return given[0]
