"""Import a strategy or use, and give it what it loads, saves or calls."""

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
class Load:
    """The load that a strategy performs: a checkpoint, and the model with its device and dtype.

    Attributes:
        checkpoint: the path of the checkpoint's file, or of its folder if the format has several files.
        device: the device on which every parameter and buffer must be after the load.
        dtype: the dtype that every floating-point parameter and buffer must have after the load.
        options: the options that a suite (a YAML file) sets for this strategy.
    """

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any]
    _model: ModelSpec
    _builder: Callable[..., torch.nn.Module]
    _marks: Any  # measures phases: a worker has a ``Marks``, and a prediction has a ``Ledger``

    # Few strategies need ``hugging_face_folder``, whose import is a part of their memory.

    @property
    def pretrained(self) -> Mapping[str, Any]:
        """Keyword arguments for a call of ``pretrained_class``; only for a Hugging Face folder."""
        from weighin.stream.hugging_face_folder import code_of

        names = ("architecture", "config")
        return {name: self._model.kwargs[name] for name in names} | {"code": code_of(self._model)}

    @property
    def folder(self) -> Mapping[str, Any] | None:
        """Keyword arguments for a call of ``load_pretrained``; None if the checkpoint is no Hugging Face folder."""
        from weighin.stream.hugging_face_folder import arguments_of

        return arguments_of(self._model, self.checkpoint)

    @property
    def adapter(self) -> Path | None:
        """The folder with the LoRA adapter to merge into the model; None if there is none."""
        from weighin.stream.hugging_face_folder import adapter_of

        return adapter_of(self._model)

    def build_model(self) -> torch.nn.Module:
        """Build and initialise the model on PyTorch's current default device."""
        return construct(lambda: self._builder(**self._model.kwargs), self.dtype)

    def reset_buffers(self, model: torch.nn.Module) -> None:
        """Set every non-persistent buffer, which no checkpoint has, to the value that it has after the model's
        constructor; a model built on the meta device has no values in any buffer.
        """
        reset_buffers(model, self._builder, self._model.kwargs, self.device, self.dtype)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the code in the ``with`` block as a phase; phases do not nest. ValueError: the name is not 1 to 64
        of A-Z a-z 0-9 space _ . + / ( ) -, does not begin with a letter or digit, or is a phase of weighin.
        """
        return self._marks.phase(named_by_strategy(name))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Save:
    """The save that a strategy performs.

    Attributes:
        model: the complete model, on the cell's device and in the cell's dtype.
        target: an empty folder on a disk, in which the save must leave exactly one checkpoint.
        format: the format to write: one in the list FORMATS of the strategy's file.
        options: the options that a suite (a YAML file) sets for this strategy.
        phase: as of ``Load``.
    """

    model: torch.nn.Module
    target: Path
    format: str
    options: Mapping[str, Any]
    phase: Callable[[str], AbstractContextManager[None]]


def import_strategy(path: Path | str, name: str = "load") -> Callable[[Any], Any]:
    """Import a strategy's or use's file, and return its function ``name``: "load", "save" or "use"."""
    spec = spec_from_file_location(f"weighin_strategy_{Path(path).stem}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


class Inputs(NamedTuple):
    """The arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(*tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(self)))


def example_inputs(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Inputs | None:
    """Return what ``example_inputs`` in the builder's module returns (a tensor, a tuple or list of arguments, or a
    mapping of keywords), with floating-point tensors of ``dtype``; None for nothing, or without this function.
    """
    examples = getattr(sys.modules[builder.__module__], "example_inputs", None)
    arguments: Any = examples(**kwargs) if examples else None
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if not arguments:
        return None
    is_named = isinstance(arguments, Mapping)
    given = ((), dict(arguments)) if is_named else (tuple(arguments), {})

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return Inputs(*tree_map_only(torch.Tensor, converted, given))


def settle_math() -> None:
    """Call MKL's vector functions on one thread, so that MKL selects its kernels there. If two threads make the
    first calls, MKL may compute parts of one result by different routines: a table of rotary cosines was then wrong by 1.5e-4.
    """
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(8))
