"""Import a strategy, give it what it loads, and verify its model: tensors, buffers, ties and forward pass."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.manifest import Manifest, TensorEntry
from weighin.stream.construct import Builder, construct, reset_buffers
from weighin.stream.slices import dtype_name
from weighin.stream.tensors import named_tensors as tensors_by_name
from weighin.stream.tensors import tensors_in
from weighin.text import first_names
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


class WrongWeights(Exception):
    """The model that a strategy loaded, or the checkpoint that it saved, is not as expected."""


def named_tensors(model: torch.nn.Module, wanted: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by its full name, a tied tensor under each name; and what else of ``wanted``
    is in the state dict, because the modules of bitsandbytes have their scales only there.
    """
    tensors = tensors_by_name(model)
    if others := set(wanted) - tensors.keys():
        state = model.state_dict()
        tensors |= {name: state[name] for name in others if torch.is_tensor(state.get(name))}
    return tensors


def touch(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Read every byte of every tensor, or of this process's shard of it, and return the checksums."""
    once = {identity(tensor): _local(tensor) for tensor in tensors.values()}
    threads = torch.get_num_threads()
    # One thread for each tensor: torch's own threads would synchronise after every 4 MiB.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            checksums = dict(zip(once, pool.map(checksum, once.values()), strict=True))
    finally:
        torch.set_num_threads(threads)
    return {name: checksums[identity(tensor)] for name, tensor in tensors.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share only if they view the same memory in the same way."""
    tensor = _local(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def check_structure(
    tensors: dict[str, torch.Tensor], manifest: Manifest, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise WrongWeights if a tensor is missing, unexpected, untied, without values, or of a wrong device, shape or
    dtype.
    """
    expected = {entry.name: entry for entry in manifest.tensors}
    complain("missing from the model", expected.keys() - tensors.keys())
    complain("not in the checkpoint", tensors.keys() - expected.keys())
    left = [name for name, tensor in tensors.items() if tensor.is_meta]
    complain("left on the meta device, without values", left)
    elsewhere = [name for name, t in tensors.items() if t.device.type != device.type]
    complain(f"not on {device}", elsewhere)
    shapes = [n for n, tensor in tensors.items() if tuple(tensor.shape) != expected[n].shape]
    complain("of another shape than in the checkpoint", shapes)
    of_dtype: dict[str, list[str]] = {}
    untied = []
    for name, entry in expected.items():
        if (wanted := wanted_dtype(entry, dtype)) != dtype_name(tensors[name].dtype):
            of_dtype.setdefault(wanted, []).append(name)
        if entry.shared_with and identity(tensors[name]) != identity(tensors[entry.shared_with]):
            untied.append(name)
    for wanted in sorted(of_dtype):
        complain(f"not of dtype {wanted}", of_dtype[wanted])
    complain("no longer tied to the tensor that they share", untied)


def check_values(
    checksums: dict[str, str], manifest: Manifest, dtype: torch.dtype
) -> tuple[str, ...]:
    """Raise WrongWeights if a tensor's checksum differs from the checkpoint's.

    Of a tensor that ``from_pretrained`` changes after reading it, the values in the file and the
    changed values both count as correct; the returned notes name such tensors.
    """
    wrong, changed, of_file = [], [], []
    for entry in manifest.tensors:
        kind, value = wanted_dtype(entry, dtype), checksums[entry.name]
        if entry.file_checksums and value == entry.file_checksums[kind]:
            of_file.append(entry.name)
        elif value != entry.checksums[kind]:
            wrong.append(entry.name)
        elif entry.file_checksums:
            changed.append(entry.name)
    complain("with other values than in the checkpoint", wrong)
    whose = {
        "of the file, which from_pretrained changes after reading": of_file,
        "of from_pretrained, which changes those of the file after reading": changed,
    }
    return tuple(_tensors(f"with the values {what}", each) for what, each in whose.items() if each)


def check_forward(model: torch.nn.Module, inputs: Inputs) -> None:
    """Run one forward pass; raise WrongWeights if the output has a value that is not finite."""
    model.eval()
    with torch.inference_mode():
        output = model(*inputs.positional, **inputs.keywords)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(output)):
        raise WrongWeights("the forward pass returns values that are not finite")


def complain(what: str, names: Iterable[str]) -> None:
    """Raise WrongWeights with the text ``what`` and the tensors' ``names``, if there are names."""
    if faulty := sorted(names):
        raise WrongWeights(_tensors(what, faulty))


def _tensors(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)} {what}: {first_names(names)}"


def wanted_dtype(entry: TensorEntry, dtype: torch.dtype) -> str:
    """Return a tensor's dtype after a correct load: ``dtype`` if it is floating-point, else its own."""
    return dtype_name(dtype) if dtype_name(dtype) in entry.checksums else entry.dtype
