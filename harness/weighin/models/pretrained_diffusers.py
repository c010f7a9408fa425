"""Build a model of the diffusers library, a part of a pipeline, as its ``from_pretrained`` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from weighin.errors import ConfigError
from weighin.models.pretrained import class_of_pipelines, import_failed, imported, says
from weighin.stream.pretrained_folder import folder_of, variant_of
from weighin.stream.pretrained_library import DIFFUSERS

_QUANTISED: Final = "quantization_config"


def from_config(architecture: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model of a class such as "UNet2DConditionModel" in evaluation mode, in torch's default
    dtype; non-persistent buffers keep their dtypes, as with ``from_pretrained``.
    """
    _refuse_quantised(architecture, config)
    kind = diffusers_class(architecture)
    model: torch.nn.Module = kind.from_config(dict(config))
    dtype, kept = torch.get_default_dtype(), kind._keep_in_fp32_modules or ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        wanted = torch.float32 if any(part in kept for part in name.split(".")) else dtype
        if tensor.is_floating_point() and tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)
    model.keeps_dtypes = True  # type: ignore[assignment]
    return model.eval()


def _refuse_quantised(architecture: str, config: Mapping[str, Any]) -> None:
    if quantised := config.get(_QUANTISED):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise ConfigError(
            f"the weights of this {architecture} are quantised by {method or 'a method'}, and"
            " weighin has no code to dequantise them",
            "give the folder of the model that was not quantised",
        )


def diffusers_class(architecture: str) -> Any:
    diffusers = imported(DIFFUSERS)
    try:
        kind = getattr(diffusers, architecture, None) or class_of_pipelines(architecture)
    except (ImportError, RuntimeError) as error:
        raise import_failed(DIFFUSERS.name, error) from error
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise ConfigError(
            f"diffusers {diffusers.__version__} has no model class {architecture!r}",
            "install the version in config.json's _diffusers_version, or a newer one",
        )
    return kind


def import_class(kwargs: Mapping[str, Any]) -> None:
    diffusers_class(kwargs["architecture"])


def reference(
    kwargs: Mapping[str, Any], checkpoint: Path, dtype: torch.dtype
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model that ``from_pretrained`` loads, and the names of weights that the files lack."""
    _refuse_quantised(**kwargs)
    kind, folder = diffusers_class(kwargs["architecture"]), folder_of(checkpoint)
    arguments = options(folder, variant_of(checkpoint))
    called = f"{checkpoint}: {kind.__name__}.from_pretrained"
    with says(called, "choose the class from which the checkpoint was saved"):
        model, info = kind.from_pretrained(
            folder, torch_dtype=dtype, output_loading_info=True, **arguments
        )
    buffers = dict(model.named_buffers())
    return model, [name for name in info["missing_keys"] if name not in buffers]


def options(folder: Path, variant: str = "") -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` finds the weights of a folder, also .bin shards."""
    if variant:
        return {"local_files_only": True, "variant": variant}
    bin_index = "diffusion_pytorch_model.bin.index.json"
    names = {name for name in DIFFUSERS.weights if (folder / name).is_file()}
    return {"local_files_only": True} | ({"use_safetensors": False} if names == {bin_index} else {})


def example_inputs(architecture: str, config: Mapping[str, Any]) -> None:
    """Return None, because the inputs differ between the classes of diffusers."""
