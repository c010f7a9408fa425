"""Folders of quantised models, as the libraries that quantise write them, and adapters beside models."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from layouts import Layout, Made, all_but, refused
from quantised_folders import DEQUANTISED, OURS, UNREAD, quantised_state, write_folder
from quantised_folders import LAYOUTS as FOLDERS
from small import edit, llama

GROUP: Final = "Quantised models"
_ADAPTERS: Final = "Adapters"
_WEIGHTS: Final = all_but("inspect", "transformers")
_METHOD: Final = "quantised with {}: .* codes that mean something only with their scales"

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    name: ("compressed_tensors",) for name in OURS if name not in DEQUANTISED
}
_ASKS: Final[Mapping[str, str]] = {
    "bitsandbytes int8": "bitsandbytes", "bitsandbytes nf4": "bitsandbytes",
    "gptq": "optimum, gptqmodel", "awq": "gptqmodel", "quanto": "optimum-quanto", "hqq": "hqq",
}  # fmt: skip
"""Packages that no environment of ours has: strategy transformers names them."""


def _folder(name: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        for package in _PACKAGES.get(name, ()):
            importlib.import_module(package)
        folder.rmdir()
        return Made(write_folder(folder, name), None, is_folder=True)

    return make


def _words(name: str) -> str:
    method = FOLDERS[name].method.replace("(", r"\(").replace(")", r"\)")
    return _METHOD.format(method)


def _layout(name: str) -> Layout:
    words = _words(name)
    if why := UNREAD.get(name):
        return Layout(f"codes of {name}", GROUP, _folder(name),
                      refused(f"{words}.*{why}", all_but("inspect")),
                      notes={})  # fmt: skip
    told = refused(words, ("baseline",) if name in OURS else _WEIGHTS)
    if asked := _ASKS.get(name):
        told |= {"transformers": f"needs .*{asked}"}
    return Layout(name, GROUP, _folder(name), told, packages=_PACKAGES.get(name, ()))


def _alone(folder: Path) -> Made:
    from safetensors.torch import save_file

    tensors = quantised_state("fp8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Made(folder / "model.safetensors", tensors)


def _leftover_configuration(folder: Path) -> Made:
    llama().save_pretrained(folder)
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    return Made(folder)


def _other_configuration(folder: Path) -> Made:
    llama().save_pretrained(folder)
    edit(folder / "config.json", quantization_config={"quant_method": "of-another-library"})
    return Made(folder)


def _adapter(folder: Path) -> Made:
    """Write an adapter beside the model: peft is not needed to write it."""
    from safetensors.torch import save_file

    llama().save_pretrained(folder)
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        )
    )
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 32), "B": (32, 2)}
    tensors = {
        name.format(layer, side): torch.randn(shape)
        for layer in (0, 1)
        for side, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return Made(folder)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


LAYOUTS: Final = [
    *map(_layout, FOLDERS),
    Layout(
        "a file of fp8 codes without its folder", GROUP, _alone,
        refused("codes that mean something only with .* no config.json", all_but("inspect", "load", "convert")),
        notes={"convert": ""},
    ),
    Layout(
        "quantization_config of gptq, and weights that are no codes", GROUP, _leftover_configuration,
        refused(r"quantised with gptq \(4 bits\)|needs optimum", all_but("inspect")),
    ),
    Layout("quantization_config of a method that transformers leaves alone", GROUP, _other_configuration),
    Layout(
        "adapter_config.json beside a model", _ADAPTERS, _adapter,
        refused("peft is installed here", all_but("inspect")) if _has("peft") else {},
        notes={"inspect": "", "predict": "lies beside the model", "recommend": "lies beside the model"},
    ),
]  # fmt: skip
