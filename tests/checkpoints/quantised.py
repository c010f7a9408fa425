"""Folders of quantised models, as the libraries that quantise write them, and adapters beside models."""

import importlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from layouts import Layout, Made, Maker, all_but, refused
from quantised_folders import DEQUANTISED, OURS, UNREAD, quantised_state, write_folder
from quantised_folders import LAYOUTS as FOLDERS
from small import PT, WEIGHTS, config, folder_of, llama, save

GROUP: Final = "Quantised models"
_ALL_THAT_LOAD: Final = all_but("inspect", "transformers")

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    name: ("compressed_tensors",) for name in OURS if name not in DEQUANTISED
}
_ASKS: Final[Mapping[str, str]] = {
    "bitsandbytes int8": "bitsandbytes", "bitsandbytes nf4": "bitsandbytes",
    "gptq": "optimum", "awq": "gptqmodel", "quanto": "optimum-quanto", "hqq": "HQQ",
}  # fmt: skip
"""Packages that no environment of ours has."""
_LIBRARY: Final = "from_pretrained fails: ImportError: .*"


def _folder(name: str) -> Maker:
    def make(folder: Path) -> Made:
        for package in _PACKAGES.get(name, ()):
            importlib.import_module(package)
        folder.rmdir()
        return Made(write_folder(folder, name), None, is_folder=True)

    return make


def _layout(name: str) -> Layout:
    method = FOLDERS[name].method.replace("(", r"\(").replace(")", r"\)")
    words = (
        f"quantised with {method}: .* of quantised values, which mean nothing without their scales"
    )
    if why := UNREAD.get(name):
        told = refused(f"{words}.*{why}", all_but("inspect"))
        return Layout(f"codes of {name}", GROUP, _folder(name), told)
    told = refused(words, ("baseline",) if name in OURS else _ALL_THAT_LOAD)
    if asked := _ASKS.get(name):  # before a load is tried, the library is asked for its model
        told |= refused(f"{_LIBRARY}{asked}", ("streaming", "transformers", "baseline"))
    return Layout(name, GROUP, _folder(name), told, packages=_PACKAGES.get(name, ()))


def _alone(folder: Path) -> Made:
    return save(quantised_state("fp8"), folder / WEIGHTS, metadata=PT)


def _of_method(**quantization: object) -> Maker:
    """Return the maker of weights that are no codes, whatever config.json says."""
    return folder_of(llama, config(quantization_config=quantization))


def _add_adapter(folder: Path) -> None:
    """Write an adapter beside the model: peft is not needed to write it."""
    described = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.randn(shape)
        for layer in (0, 1)
        for side, shape in {"A": (2, 32), "B": (32, 2)}.items()
    }  # fmt: skip
    save(tensors, folder / "adapter_model.safetensors", metadata=PT)


LAYOUTS: Final = [
    *map(_layout, FOLDERS),
    Layout(
        "a file of fp8 codes without its folder", GROUP, _alone,
        refused("quantised values, which mean nothing without .* no config.json", all_but("inspect", "load", "convert")),
    ),
    Layout(
        "quantization_config of gptq, and weights that are no codes", GROUP, _of_method(quant_method="gptq", bits=4),
        refused(rf"quantised with gptq \(4 bits\)|{_LIBRARY}optimum", all_but("inspect")),
    ),
    Layout("quantization_config of a method that transformers leaves alone", GROUP, _of_method(quant_method="of-another-library")),
    Layout(
        "adapter_config.json beside a model", "Adapters", folder_of(llama, _add_adapter),
        refused("peft is installed here", all_but("inspect")) if find_spec("peft") else {},
        notes={"predict": "lies beside the model", "recommend": "lies beside the model"},
    ),
]  # fmt: skip
