"""Offer to a strategy what it may import of weighin::

    from weighin.strategy import Load, retie, tied_names

A strategy is one file with a function ``load(job: Load) -> Module`` or, to save, ``save(job: Save) -> None``. What it
imports is imported at its first use, because a strategy's memory includes the memory of its imports.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for types only, because this module must not import torch at run time
    from weighin.models.pretrained import arguments_to_dequantise, pretrained_class
    from weighin.models.pretrained_diffusers import diffusers_class
    from weighin.stream.construct import without_weights
    from weighin.stream.formats import files
    from weighin.stream.hugging_face_folder import from_pretrained_arguments
    from weighin.stream.load_pretrained import load_pretrained
    from weighin.stream.load_streaming import load_streaming
    from weighin.stream.sharded_files import MAX_SHARD_BYTES, file_name
    from weighin.stream.tensors import assign, retie, share_missing, tied_names
    from weighin.worker.loading import Load, Save

__all__ = [
    "MAX_SHARD_BYTES", "Load", "Save", "arguments_to_dequantise", "assign", "diffusers_class",
    "file_name", "files", "from_pretrained_arguments", "load_pretrained", "load_streaming",
    "pretrained_class", "retie", "share_missing", "tied_names", "without_weights",
]  # fmt: skip

_MODULES = {
    "weighin.models.pretrained": ["arguments_to_dequantise", "pretrained_class"],
    "weighin.models.pretrained_diffusers": ["diffusers_class"],
    "weighin.stream.construct": ["without_weights"],
    "weighin.stream.sharded_files": ["MAX_SHARD_BYTES", "file_name"],
    "weighin.stream.formats": ["files"],
    "weighin.stream.load_pretrained": ["load_pretrained"],
    "weighin.stream.load_streaming": ["load_streaming"],
    "weighin.stream.hugging_face_folder": ["from_pretrained_arguments"],
    "weighin.stream.tensors": ["assign", "retie", "share_missing", "tied_names"],
}
HELPERS = {name: module for module, names in _MODULES.items() for name in names}
"""Maps the name of each function or number that a strategy may call or read to the module that has it."""


def __getattr__(name: str) -> Any:
    module = "weighin.worker.loading" if name in ("Load", "Save") else HELPERS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
