"""Prepare a worker for its baseline, its memory before the load; import a strategy, and define the
``Load`` with which the worker calls it.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from weighin.cell import ModelSpec
from weighin.phase_reporter import read_text
from weighin.stream.construct import Builder, construct, reset_buffers
from weighin.worker.phases import named_by_strategy

_WARM_PIECE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The implementation of ``weighin.strategy.Load`` in the measured process."""

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any]
    model: ModelSpec
    builder: Callable[..., torch.nn.Module]
    marks: Any  # measures phases: a worker has a ``Marks``, and a prediction has a ``Ledger``

    @property
    def pretrained(self) -> Mapping[str, Any]:
        from weighin.stream.pretrained_folder import code_of  # no other strategy needs it

        names = ("architecture", "config")
        return {name: self.model.kwargs[name] for name in names} | {"code": code_of(self.model)}

    @property
    def folder(self) -> Mapping[str, Any] | None:
        from weighin.stream.pretrained_folder import arguments_of  # few loads need it

        return arguments_of(self.model, self.checkpoint)

    @property
    def adapter(self) -> Path | None:
        from weighin.stream.pretrained_folder import adapter_of

        return adapter_of(self.model)

    def build_model(self) -> torch.nn.Module:
        return construct(lambda: self.builder(**self.model.kwargs), self.dtype)

    def reset_buffers(self, model: torch.nn.Module) -> None:
        reset_buffers(model, self.builder, self.model.kwargs, self.device, self.dtype)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.marks.phase(named_by_strategy(name))  # type: ignore[no-any-return]


def import_strategy(path: Path | str, name: str = "load") -> Callable[[Any], Any]:
    """Import a strategy's or use's file, and return its function ``name``: "load", "save" or "use"."""
    spec = spec_from_file_location(f"weighin_strategy_{Path(path).stem}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Any], Any] = getattr(module, name)
    return function


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Inputs":
        return self._mapped(lambda tensor: tensor.to(device))

    def of(self, dtype: torch.dtype) -> "Inputs":
        """Return the inputs with floating-point tensors of ``dtype``."""
        return self._mapped(lambda one: one.to(dtype) if one.is_floating_point() else one)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        return Inputs(*tree_map_only(torch.Tensor, change, (self.positional, self.keywords)))


def example_inputs(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Inputs | None:
    """Return the inputs of one forward pass; None if the builder's module has no ``example_inputs``.

    ``example_inputs`` may return a tuple or list of positional arguments, a mapping of keyword
    arguments, or one tensor. The inputs are on the CPU, with floating-point tensors of ``dtype``.
    """
    examples = getattr(sys.modules[builder.__module__], "example_inputs", None)
    arguments = examples(**kwargs) if examples else None
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if not arguments:
        return None
    if isinstance(arguments, Mapping):
        return Inputs(keywords=dict(arguments)).of(dtype)
    return Inputs(tuple(arguments)).of(dtype)


def settle_math() -> None:
    """Call MKL's vector functions on one thread, so that MKL selects its kernels there.

    If two threads make the first calls at the same time, MKL sometimes computes a part of the
    result with another kernel. In 1 of 100 processes on a busy machine, a table of rotary cosines
    was wrong by 1.5e-4 (torch 2.13, MKL 2024.2). weighin would blame the strategy for this error.
    """
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(8))


def read_through(checkpoint: Path) -> None:
    """Read every file of the checkpoint, so that the kernel charges its pages to the cell's cgroup."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    if checkpoint.suffix == ".json":  # an index of shards
        from weighin.stream import formats  # no other load needs it

        files = formats.files(checkpoint)
    piece = bytearray(_WARM_PIECE_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass


def join_group(device: torch.device) -> None:
    """Join the process group of all ranks: gloo for the CPU, gloo and nccl for CUDA."""
    import torch.distributed as dist  # no other worker needs it

    timeout = timedelta(days=365)  # weighin itself ends the ranks at the cell's time-out
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def check_preloaded() -> None:
    """Raise OSError if a library in LD_PRELOAD was not loaded, because the linker only prints a warning."""
    mapped = read_text("/proc/self/maps")
    for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if os.path.realpath(library) not in mapped:
            raise OSError(
                f"the worker runs without the library {library} that LD_PRELOAD names,"
                " because the dynamic linker did not load it"
            )
