"""What a model's checkpoint consists of, read from its skeleton."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.manifest import Kind, TensorEntry
from weighin.checkpoint.piecewise import CELL_DTYPES, dtype_name
from weighin.errors import ConfigError
from weighin.models.skeleton import (
    RealBuffers,
    build_skeleton,
    constructed_buffers,
    non_persistent_buffers,
    resolve_builder,
)


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """One tensor of a skeleton, of which buffers have values."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    shared_with: str | None

    def entry(self, checksums: dict[str, str], dtype: torch.dtype | None = None) -> TensorEntry:
        """Return the manifest's entry for it, in ``dtype`` where the checkpoint has another."""
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
    builder: str, kwargs: Mapping[str, Any], *, real_buffers: RealBuffers
) -> list[Described]:
    """Return all tensors of a model: its state dict in order, then its non-persistent buffers.

    Raises:
        ConfigError: the builder cannot be used, or its state dict is not made of parameters and
            persistent buffers alone.
    """
    model = build_skeleton(resolve_builder(builder), kwargs, real_buffers=real_buffers)
    _refuse_lazy(builder, model)
    found: list[Described] = []
    first_names: dict[int, str] = {}

    def add(name: str, tensor: torch.Tensor, kind: Kind) -> None:
        first = first_names.setdefault(id(tensor), name)
        found.append(Described(name, tensor, kind, None if first == name else first))

    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, value in model.state_dict(keep_vars=True).items():
        if name in parameters and value is parameters[name]:
            add(name, value, "parameter")
        elif name in buffers and value is buffers[name]:
            add(name, value, "persistent_buffer")
        else:
            raise ConfigError(
                f"builder {builder}: {name!r} in the state dict is no parameter and no buffer",
                "give a model without state-dict hooks and extra state",
            )
    for name, (owner, leaf) in non_persistent_buffers(model):
        value = owner._buffers[leaf]
        assert value is not None
        add(name, value, "non_persistent_buffer")
    if not found:
        raise ConfigError(f"builder {builder}: the model has no tensors", "give another model")
    return found


def _refuse_lazy(builder: str, model: torch.nn.Module) -> None:
    names = [
        name
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
        if torch.nn.parameter.is_lazy(tensor)
    ]
    if names:
        raise ConfigError(
            f"builder {builder}: nobody knows the shape of {names[0]!r} yet: its module is lazy",
            "run the model once in the builder, or give its layers their sizes",
        )


def in_checkpoint(described: list[Described]) -> list[Described]:
    """Return those that a checkpoint holds under a key."""
    return [one for one in described if one.kind != "non_persistent_buffer"]


def buffer_checksums(builder: str, kwargs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the checksums of the non-persistent buffers, by name and dtype, as a load must leave them.

    Of models that are really constructed, in every dtype that a cell may want, as nothing else tells
    what a constructor computes. Takes the memory of one model.

    """
    build = resolve_builder(builder)
    found: dict[str, dict[str, str]] = {}
    for wanted in CELL_DTYPES:
        for name, value in constructed_buffers(build, kwargs, getattr(torch, wanted)).items():
            found.setdefault(name, {})[dtype_name(value.dtype)] = checksum(value)
    return found
