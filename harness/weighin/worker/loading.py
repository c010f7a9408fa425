"""Import a strategy, and give it what it loads; prepare the inputs of a forward pass, and the math library."""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from weighin.cell import ModelSpec
from weighin.stream.construct import Builder, construct, reset_buffers
from weighin.worker.phases import named_by_strategy


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

    # Few strategies need ``pretrained_folder``, whose import is a part of their memory.

    @property
    def pretrained(self) -> Mapping[str, Any]:
        from weighin.stream.pretrained_folder import code_of

        names = ("architecture", "config")
        return {name: self.model.kwargs[name] for name in names} | {"code": code_of(self.model)}

    @property
    def folder(self) -> Mapping[str, Any] | None:
        from weighin.stream.pretrained_folder import arguments_of

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


class Inputs(NamedTuple):
    """The arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})

    def to(self, device: torch.device) -> "Inputs":
        return self.each(lambda tensor: tensor.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        return Inputs(*tree_map_only(torch.Tensor, change, tuple(self)))


def example_inputs(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Inputs | None:
    """Return the inputs of one forward pass, on the CPU, with floating-point tensors of ``dtype``.

    ``example_inputs`` in the builder's module may return positional arguments (a tuple or list), keyword
    arguments (a mapping), or one tensor. Without this function, return None.
    """
    examples = getattr(sys.modules[builder.__module__], "example_inputs", None)
    arguments = examples(**kwargs) if examples else None
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if not arguments:
        return None
    if isinstance(arguments, Mapping):
        inputs = Inputs(keywords=dict(arguments))
    else:
        inputs = Inputs(tuple(arguments))
    return inputs.each(lambda one: one.to(dtype) if one.is_floating_point() else one)


def settle_math() -> None:
    """Call MKL's vector functions on one thread, so that MKL selects its kernels there.

    If two threads make the first calls at the same time, MKL sometimes computes a part of the
    result with another kernel. In 1 of 100 processes on a busy machine, a table of rotary cosines
    was wrong by 1.5e-4 (torch 2.13, MKL 2024.2). weighin would blame the strategy for this error.
    """
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(8))
