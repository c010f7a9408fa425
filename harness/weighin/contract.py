"""What a strategy sees.

A way of loading is one file with a function ``load(job: Load) -> Module``; a way of saving is one
with ``save(job: Save) -> None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # only for the types: reading a strategy's constants must not import torch
    import torch


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
