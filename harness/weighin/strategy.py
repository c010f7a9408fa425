"""What a strategy sees, and what its file may take from weighin.

A strategy is one file with a function ``load(job: Load) -> Module``; one that saves has
``save(job: Save) -> None``. Helpers are imported from here, and only those that a file names: what a
strategy imports is a part of what is measured of it::

    from weighin.strategy import Load, retie, tied_names
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # only for the types: reading a strategy's constants must not import torch
    import torch

    from weighin.formats import files
    from weighin.formats.folder_index import file_name
    from weighin.formats.sharded import MAX_SHARD_BYTES
    from weighin.loader.load import load_streaming
    from weighin.models.skeleton import without_weights
    from weighin.models.tied_weights import retie, share_missing, tied_names

__all__ = [
    "MAX_SHARD_BYTES",
    "Load",
    "Save",
    "file_name",
    "files",
    "load_streaming",
    "retie",
    "share_missing",
    "tied_names",
    "without_weights",
]

HELPERS = {
    "MAX_SHARD_BYTES": "weighin.formats.sharded",
    "file_name": "weighin.formats.folder_index",
    "files": "weighin.formats",
    "load_streaming": "weighin.loader.load",
    "retie": "weighin.models.tied_weights",
    "share_missing": "weighin.models.tied_weights",
    "tied_names": "weighin.models.tied_weights",
    "without_weights": "weighin.models.skeleton",
}
"""The module of each helper, which is imported once a strategy asks for it."""


class Load(Protocol):
    """One load to perform: where from, where to, and what with."""

    @property
    def checkpoint(self) -> Path:
        """The file, or the folder for formats of many files."""
        ...

    @property
    def device(self) -> torch.device:
        """Where every parameter and buffer must end."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What every floating-point parameter and buffer must end as."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The cell's options for this strategy, from a suite's YAML."""
        ...

    def build_model(self) -> torch.nn.Module:
        """Build the model, with its own initialisation, on the device of the context."""
        ...

    def reset_buffers(self, model: torch.nn.Module) -> None:
        """Give every non-persistent buffer the value that its constructor gives it.

        Such buffers are in no checkpoint: whoever builds on the meta device loses them.
        """
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure what runs inside as a phase of this name. Phases do not nest."""
        ...


class Save(Protocol):
    """One save to perform: what, and where to."""

    @property
    def model(self) -> torch.nn.Module:
        """The model, whole, on the cell's device and in its dtype."""
        ...

    @property
    def target(self) -> Path:
        """An empty folder on a disk. What lies in it at the end is one checkpoint."""
        ...

    @property
    def format(self) -> str:
        """The layout to write: one of those that the strategy's FORMATS names."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The cell's options for this strategy, from a suite's YAML."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure what runs inside as a phase of this name. Phases do not nest."""
        ...


def __getattr__(name: str) -> Any:
    """Import a helper for the strategy that asks for it."""
    if name not in HELPERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HELPERS[name]), name)
