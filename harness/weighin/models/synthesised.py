"""Build a model without code and forward pass: from a checkpoint's tensors, or from a table of shapes."""

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weighin.errors import ConfigError
from weighin.stream.slices import ITEM_BYTES, is_sizes

_MOST_BYTES = 64 * 1024**2  # of JSON, because records may be forged


def from_tensors(*, tensors: str) -> nn.Module:
    """Return a module tree with the tensors in a string of ``stream.slices.pack``."""
    root = nn.Module()
    made: list[torch.Tensor] = []
    try:
        data = zlib.decompressobj().decompress(base64.urlsafe_b64decode(tensors), _MOST_BYTES)
        names, kind_of, tied_to, kinds = json.loads(data)
        for name, kind, back in zip(names, kind_of, tied_to, strict=True):
            dtype, *shape = kinds[kind]
            if not (isinstance(name, str) and dtype in ITEM_BYTES and is_sizes(shape)):
                raise ValueError(f"tensor {len(made)} is malformed")  # noqa: TRY301
            tensor = made[-back] if back > 0 else torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.is_floating_point() and back <= 0:
                tensor = nn.Parameter(tensor)
            made.append(tensor)
            _put(root, name, tensor)
    except (ValueError, TypeError, IndexError, RecursionError, zlib.error) as error:
        raise ConfigError(
            f"the model's argument `tensors` does not describe the tensors of a checkpoint: {error}",
            "name the checkpoint: --model from:CHECKPOINT",
        ) from None
    return root


def from_table(*, dtype: str, tensors: Mapping[str, Sequence[Any]]) -> nn.Module:
    """Return a module tree with an uninitialised parameter for each tensor of a table.

    ``tensors`` maps names to shapes, and ``layers.{0..2}.{k,v}.weight`` stands for six names. A shape such as
    ``[uint8, 64, 32]`` begins with the tensor's own dtype, which no load converts. weighin itself reads
    ``dtype``, that of the published files, for ``--dtype auto``.
    """
    del dtype
    root = nn.Module().eval()
    for names, (*own, size) in tensors.items():
        kind = getattr(torch, own.pop(0)) if own and isinstance(own[0], str) else None
        for name in _expanded(names):
            values = torch.empty(*own, size, dtype=kind)
            _put(root, name, nn.Parameter(values, requires_grad=kind is None))
    root.keeps_dtypes = True  # type: ignore[assignment]  # a flag for construct(), not a module
    return root


def _expanded(name: str) -> Iterator[str]:
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([\w.,]+))\}", name)
    if found is None:
        yield name
        return
    first, last, listed = found.groups()
    for part in listed.split(",") if listed else range(int(first), int(last) + 1):
        yield from _expanded(f"{name[: found.start()]}{part}{name[found.end() :]}")


def _put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, leaf = name.split(".")
    owner: Any = root
    for part in path:  # not add_module(), which refuses names such as "type"
        owner = owner._modules.setdefault(part, nn.Module())
    kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
    getattr(owner, kind)[leaf] = tensor
