"""Define the interface of a strategy, and offer functions that strategies need.

A strategy is one file with a function ``load(job: Load) -> Module`` or, to save, ``save(job: Save)
-> None``. A strategy imports weighin's functions from ``weighin.strategy``. This module imports the
code of a function only when a strategy uses the function, because a strategy's memory includes the
memory of its imports::

    from weighin.strategy import Load, retie, tied_names
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # for types only, because this module must not import torch at run time
    import torch

    from weighin.models.pretrained import arguments_to_dequantise, pretrained_class
    from weighin.models.pretrained_diffusers import diffusers_class
    from weighin.stream.construct import without_weights
    from weighin.stream.folders import MAX_SHARD_BYTES, file_name
    from weighin.stream.formats import files
    from weighin.stream.hugging_face import load_pretrained
    from weighin.stream.model import load_streaming
    from weighin.stream.pretrained_folder import from_pretrained_arguments
    from weighin.stream.tensors import assign, retie, share_missing, tied_names

__all__ = [
    "MAX_SHARD_BYTES", "Load", "Save", "arguments_to_dequantise", "assign", "diffusers_class",
    "file_name", "files", "from_pretrained_arguments", "load_pretrained", "load_streaming",
    "pretrained_class", "retie", "share_missing", "tied_names", "without_weights",
]  # fmt: skip

_MODULES = {
    "weighin.models.pretrained": ["arguments_to_dequantise", "pretrained_class"],
    "weighin.models.pretrained_diffusers": ["diffusers_class"],
    "weighin.stream.construct": ["without_weights"],
    "weighin.stream.folders": ["MAX_SHARD_BYTES", "file_name"],
    "weighin.stream.formats": ["files"],
    "weighin.stream.hugging_face": ["load_pretrained"],
    "weighin.stream.model": ["load_streaming"],
    "weighin.stream.pretrained_folder": ["from_pretrained_arguments"],
    "weighin.stream.tensors": ["assign", "retie", "share_missing", "tied_names"],
}
HELPERS = {name: module for module, names in _MODULES.items() for name in names}
"""Maps each name to the module that has it. That module is imported at the name's first use."""


class _Measured(Protocol):
    @property
    def options(self) -> Mapping[str, Any]:
        """The options that a suite (a YAML file) sets for this strategy."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the code in the ``with`` block as a phase of this name. Phases do not nest.

        Raises:
            ValueError: the name is not 1 to 64 letters, digits, spaces and _ . + / ( ) -, does not
                begin with a letter or digit, or is a phase of weighin itself, such as ``touch``.
        """


class Load(_Measured, Protocol):
    """The load that a strategy performs: a checkpoint, and the model with its device and dtype."""

    @property
    def checkpoint(self) -> Path:
        """The path of the checkpoint's file, or of its folder if the format has several files."""

    @property
    def device(self) -> torch.device:
        """The device on which every parameter and buffer must be after the load."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that every floating-point parameter and buffer must have after the load."""

    @property
    def pretrained(self) -> Mapping[str, Any]:
        """Keyword arguments for a call of ``pretrained_class``; only for a Hugging Face folder."""

    @property
    def folder(self) -> Mapping[str, Any] | None:
        """Keyword arguments for a call of ``load_pretrained``; None for any other checkpoint than the
        files of a Hugging Face folder.
        """

    @property
    def adapter(self) -> Path | None:
        """The folder with the LoRA adapter to merge into the model; None without an adapter."""

    def build_model(self) -> torch.nn.Module:
        """Build and initialise the model on PyTorch's current default device."""

    def reset_buffers(self, model: torch.nn.Module) -> None:
        """Set every non-persistent buffer to the value that it has after the model's constructor.

        No checkpoint contains non-persistent buffers, and a model built on the meta device has no
        values in any buffer.
        """


class Save(_Measured, Protocol):
    """The save that a strategy performs: the model, the folder to write to, and the format."""

    @property
    def model(self) -> torch.nn.Module:
        """The complete model, on the cell's device and in the cell's dtype."""

    @property
    def target(self) -> Path:
        """An empty folder on a disk, in which the save must leave exactly one checkpoint."""

    @property
    def format(self) -> str:
        """The format to write: one in the list FORMATS of the strategy's file."""


def __getattr__(name: str) -> Any:
    if name not in HELPERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HELPERS[name]), name)
