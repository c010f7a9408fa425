"""Let a quantiser say how the codes of a folder become the weights of its model.

It is transformers' own quantiser, or that of ``own_dequantiser`` for a method that transformers does not
dequantise. The quantiser adds entries to the tables by which ``from_pretrained`` renames and
converts tensors. This module attaches it to a model that is built for such a folder, and removes it
after the load.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from weighin.errors import ConfigError
from weighin.foreign import object_in
from weighin.formats.pretrained_folder import CONFIG, folder_of
from weighin.formats.quantisation_config import description_in, named_in
from weighin.formats.quantised import Quantised
from weighin.models.own_dequantiser import Dequantiser
from weighin.text import one_line

_KEY = "quantization_config"


def attach_quantiser(
    model: Any, config: Mapping[str, Any], quantised: Mapping[str, Any] | None
) -> None:
    """Attach transformers' quantiser, which dequantises, to a model that was built from its configuration.

    ``config`` and ``quantised`` are the arguments of ``from_config``. Nothing is attached for a method
    that weighin does not dequantise: the load then refuses the codes.

    Raises:
        ConfigError: transformers refuses the configuration, or a package of the method.
    """
    if not quantised or not (found := Quantised.of_argument(quantised)).dequantises:
        return
    if found.own:
        model.hf_quantizer = Dequantiser(found.own, description_in(config) or {})
        return
    auto: Any = import_module("transformers.quantizers.auto")
    settings = model.config
    settings.quantization_config = _dequantising(config)
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
    """Return the arguments by which ``from_pretrained`` dequantises on every device.

    The arguments are empty for a checkpoint in a folder whose codes it does not dequantise.
    """
    config = object_in(folder_of(checkpoint) / CONFIG)
    named = named_in(folder_of(checkpoint), config)
    if named.own or not named.dequantised:
        return {}
    auto: Any = import_module("transformers.quantizers.auto")
    return {_KEY: auto.AutoQuantizationConfig.from_dict(_dequantising(config))}


def _dequantising(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of the quantisation in a configuration, with the wish to dequantise."""
    found = description_in(config)
    return {} if found is None else {**found, "dequantize": True}


def quantiser_of(model: Any) -> Any | None:
    """Return the quantiser that is attached to a model; None for a model without one."""
    return getattr(model, "hf_quantizer", None)


def detach_quantiser(model: Any) -> None:
    """Leave a loaded model as ``from_pretrained`` leaves it: without any sign of the quantisation."""
    if (quantiser := quantiser_of(model)) is not None:
        quantiser.postprocess_model(model)


def set_dtypes(tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Give tensors of a model, which have no values yet, other dtypes; no parameter has integers."""
    for name, dtype in dtypes.items():
        if tensors[name].dtype != dtype and dtype.is_floating_point:
            tensors[name].data = torch.empty_like(tensors[name].data, dtype=dtype)
