"""Attach a quantiser to the model of a quantised folder, and remove the quantiser after the load.

A quantiser adds conversions to the tables with which ``from_pretrained`` renames and converts
tensors. The quantiser is transformers' own, or that of ``own_dequantiser`` for a method that
transformers does not dequantise.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from weighin.errors import ConfigError
from weighin.formats.pretrained_folder import folder_of
from weighin.formats.quantisation_config import dequantising, description_in, to_dequantise
from weighin.formats.quantised import Quantised
from weighin.models.own_dequantiser import Dequantiser
from weighin.text import one_line

_KEY = "quantization_config"


def attach_quantiser(
    model: Any, config: Mapping[str, Any], quantised: Mapping[str, Any] | None
) -> None:
    """Attach to a model the quantiser that dequantises the model's weights during the load.

    ``config`` and ``quantised`` are the arguments of ``from_config``. For a method that weighin does not
    dequantise, the model gets no quantiser, and the load raises a CheckpointError.

    Raises:
        ConfigError: transformers refuses the configuration, or lacks a package of the method.
    """
    if not quantised or not (found := Quantised.of_argument(quantised)).dequantises:
        return
    if found.own:
        model.hf_quantizer = Dequantiser(found.own, description_in(config) or {})
        return
    auto: Any = import_module("transformers.quantizers.auto")
    settings = model.config
    settings.quantization_config = to_dequantise(config)
    try:
        made, _, _ = auto.get_hf_quantizer(settings, None, None, True, {})
        made.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the model is {found.summary}; transformers refuses it: {one_line(str(error))}",
            f"install the packages that transformers names (it needs {found.needed}), or correct"
            f" {_KEY} in config.json",
        ) from error
    model.hf_quantizer = made


def arguments_to_dequantise(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` dequantises on every device.

    The result is empty if the folder is not quantised, or ``from_pretrained`` cannot dequantise it.
    """
    named = dequantising(folder_of(checkpoint))
    if not named:
        return {}
    auto: Any = import_module("transformers.quantizers.auto")
    return {_KEY: auto.AutoQuantizationConfig.from_dict(named)}


def quantiser_of(model: Any) -> Any | None:
    """Return the quantiser that is attached to a model; None for a model without one."""
    return getattr(model, "hf_quantizer", None)


def detach_quantiser(model: Any) -> None:
    """Remove the quantiser from a loaded model, as ``from_pretrained`` does after dequantising."""
    if (quantiser := quantiser_of(model)) is not None:
        quantiser.postprocess_model(model)


def set_dtypes(tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Set the dtypes of tensors that have no values yet, except to integer dtypes."""
    for name, dtype in dtypes.items():
        if tensors[name].dtype != dtype and dtype.is_floating_point:
            tensors[name].data = torch.empty_like(tensors[name].data, dtype=dtype)
