"""Find the module of weighin that builds the models of transformers, diffusers or timm."""

from importlib import import_module
from typing import Any, Final

import torch

from weighin.models import pretrained, pretrained_diffusers, pretrained_timm

_MODULES: Final = (pretrained, pretrained_diffusers, pretrained_timm)


def module_for(model: torch.nn.Module) -> Any | None:
    """Return the module for the library that defines a model's class; None for any other model."""
    return next((each for each in _MODULES if each.is_own(model)), None)


def module_of(builder: str) -> Any:
    """Return the module of a builder such as "weighin.models.pretrained:from_config"."""
    return import_module(builder.partition(":")[0])
