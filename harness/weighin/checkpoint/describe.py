"""List the tensors of a model, without allocating its weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.manifest import Kind, TensorEntry
from weighin.checkpoint.piecewise import CELL_DTYPES
from weighin.construction.skeleton import (
    RealBuffers,
    build_skeleton,
    constructed_buffers,
    non_persistent_buffers,
    resolve_builder,
)
from weighin.construction.tensors import named_tensors
from weighin.errors import ConfigError
from weighin.formats.dtypes import dtype_name
from weighin.formats.pretrained_folder import own_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A tensor of a model. ``describe`` leaves the values of parameters, and of some buffers,
    uninitialised.

    ``is_kept`` tells whether the tensor keeps its own floating-point dtype, whatever dtype the
    model is built in.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind
    shared_with: str | None
    is_kept: bool = False

    def entry(self, checksums: dict[str, str], dtype: torch.dtype | None = None) -> TensorEntry:
        """Return the tensor's entry for a manifest. ``dtype`` is the tensor's dtype in the file;
        None means the same dtype as in the model.
        """
        kind = dtype or self.tensor.dtype
        return TensorEntry(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=dtype_name(kind),
            bytes=self.tensor.numel() * kind.itemsize,
            kind=self.kind,
            shared_with=self.shared_with,
            checksums=checksums,
        )


def describe(
    spec: ModelSpec, *, real_buffers: RealBuffers, dtype: torch.dtype | None = None
) -> list[Described]:
    """Return a model's tensors, built in ``dtype``: its state dict, then non-persistent buffers.

    Without ``dtype``, the model has the dtype of its published files; without files, float32.

    Raises:
        ConfigError: the builder is invalid, the model has no tensors or is lazy, or its state dict
            contains more than parameters and persistent buffers.
    """
    builder, dtype = spec.builder, dtype or getattr(torch, own_dtype(spec))
    build = resolve_builder(builder)
    model = build_skeleton(build, spec.kwargs, real_buffers=real_buffers, dtype=dtype)
    own = named_tensors(model)
    if lazy := [name for name, each in own.items() if torch.nn.parameter.is_lazy(each)]:
        raise ConfigError(
            f"builder {builder}: the shape of {lazy[0]!r} is not known yet, because its module is lazy",
            "run the model once in the builder, or give the lazy layers their sizes",
        )
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in own or value is not own[name]:
            raise ConfigError(
                f"builder {builder}: {name!r} in the state dict is neither a parameter nor a buffer",
                "name another builder: weighin cannot measure a model with state-dict hooks or"
                " extra state",
            )
    described = [*described_in(model)]
    if not described:
        raise ConfigError(
            f"builder {builder}: the model has no parameters and no buffers",
            "name a builder whose model has weights: --model package.module:callable",
        )
    if not getattr(model, "keeps_dtypes", False):
        return described
    return [
        replace(one, is_kept=one.tensor.is_floating_point() and one.tensor.dtype != dtype)
        for one in described
    ]


def described_in(model: torch.nn.Module) -> Iterator[Described]:
    """Yield the tensors of a model: its state dict in order, then its non-persistent buffers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True)
    tensors = dict(persistent)
    for name, (owner, leaf) in non_persistent_buffers(model):
        tensors[name] = owner._buffers[leaf]
    firsts: dict[int, str] = {}
    for name, tensor in tensors.items():
        kind: Kind = "persistent_buffer" if name in persistent else "non_persistent_buffer"
        if name in parameters:
            kind = "parameter"
        first = firsts.setdefault(id(tensor), name)
        yield Described(name, tensor.detach(), kind, None if first == name else first)


def in_checkpoint(described: list[Described]) -> list[Described]:
    return [tensor for tensor in described if tensor.kind != "non_persistent_buffer"]


def buffer_checksums(spec: ModelSpec) -> dict[str, dict[str, str]]:
    """Return the checksums that non-persistent buffers must have after a load, by name and dtype.

    Only the model's constructor computes the values of these buffers. ``buffer_checksums``
    therefore constructs the whole model for each dtype of ``CELL_DTYPES``, and needs the memory of
    one model.
    """
    build = resolve_builder(spec.builder)
    checksums: dict[str, dict[str, str]] = {}
    for wanted in CELL_DTYPES:
        for name, value in constructed_buffers(build, spec.kwargs, getattr(torch, wanted)).items():
            checksums.setdefault(name, {})[dtype_name(value.dtype)] = checksum(value)
    return checksums
