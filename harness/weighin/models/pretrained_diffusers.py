"""Build a model of the diffusers library, a part of a pipeline, as its ``from_pretrained`` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weighin.errors import ConfigError
from weighin.models.pretrained import class_of_pipelines, imported, importing, says
from weighin.stream.hugging_face_folder import folder_of, variant_of
from weighin.stream.pretrained_library import DIFFUSERS


def from_config(architecture: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model of a class of diffusers, in torch's default dtype, for evaluation."""
    kind = _class_for_weights(architecture, config)
    model: torch.nn.Module = kind.from_config(dict(config))
    dtype, kept = torch.get_default_dtype(), kind._keep_in_fp32_modules or ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        wanted = torch.float32 if any(part in kept for part in name.split(".")) else dtype
        if tensor.is_floating_point() and tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)
    model.keeps_dtypes = True  # type: ignore[assignment]
    return model.eval()


def diffusers_class(architecture: str) -> Any:
    diffusers = imported(DIFFUSERS)
    with importing(DIFFUSERS):
        kind = getattr(diffusers, architecture, None) or class_of_pipelines(architecture)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise ConfigError(
            f"diffusers {diffusers.__version__} has no model class {architecture!r}",
            "install the version in config.json's _diffusers_version, or a newer one",
        )
    return kind


def _class_for_weights(architecture: str, config: Mapping[str, Any]) -> Any:
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else "a method"
        what = f"this {architecture} is quantised by {method}"
        repair = "give the folder of the model before quantisation"
        raise ConfigError(f"{what}; weighin dequantises no model of diffusers", repair)
    return diffusers_class(architecture)


def import_class(kwargs: Mapping[str, Any]) -> None:
    diffusers_class(kwargs["architecture"])


def reference(
    kwargs: Mapping[str, Any], checkpoint: Path, dtype: torch.dtype
) -> tuple[torch.nn.Module, list[str]]:
    kind, folder = _class_for_weights(**kwargs), folder_of(checkpoint)
    arguments: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
    present = {name for name in DIFFUSERS.weights if (folder / name).is_file()}
    if variant := variant_of(checkpoint):
        arguments["variant"] = variant
    elif present == {"diffusion_pytorch_model.bin.index.json"}:
        arguments["use_safetensors"] = False  # else it looks for no shards of .bin
    with says(
        f"{checkpoint}: {kind.__name__}.from_pretrained",
        "choose the class from which the checkpoint was saved",
    ):
        model, info = kind.from_pretrained(folder, torch_dtype=dtype, **arguments)
    buffers = dict(model.named_buffers())
    return model, [name for name in info["missing_keys"] if name not in buffers]
