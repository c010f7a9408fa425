"""Import a strategy, and define the ``Load`` object with which a worker calls it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

import torch

from weighin.cell import ModelSpec
from weighin.construction.skeleton import construct, reset_buffers
from weighin.worker.phases import named_by_strategy


class Phases(Protocol):
    """An object that measures phases: a worker has a ``Marks``, and a prediction has a ``Ledger``."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The implementation of ``weighin.strategy.Load`` in the measured process."""

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any]
    model: ModelSpec
    builder: Callable[..., torch.nn.Module]
    marks: Phases

    @property
    def pretrained(self) -> Mapping[str, Any]:
        from weighin.formats.pretrained_folder import code_of  # no other strategy needs it

        names = ("architecture", "config")
        return {name: self.model.kwargs[name] for name in names} | {"code": code_of(self.model)}

    @property
    def adapter(self) -> Path | None:
        from weighin.formats.adapters import adapter_of

        return adapter_of(self.model)

    def build_model(self) -> torch.nn.Module:
        return construct(lambda: self.builder(**self.model.kwargs), self.dtype)

    def reset_buffers(self, model: torch.nn.Module) -> None:
        reset_buffers(model, self.builder, self.model.kwargs, self.device, self.dtype)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.marks.phase(named_by_strategy(name))


def import_strategy(path: Path, name: str = "load") -> Callable[[Any], Any]:
    """Import a strategy's or use's file, and return its function ``name``: "load", "save" or "use"."""
    spec = spec_from_file_location(f"weighin_strategy_{path.stem}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Any], Any] = getattr(module, name)
    return function
