"""What a strategy sees of its cell, outside of a worker, and the checks of a worker."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from weighin.cell import ModelSpec
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.manifest import Manifest, TensorEntry
from weighin.stream.construct import resolve_builder
from weighin.suite import registry
from weighin.worker import loading, verify


def load(
    name: str,
    path: Path,
    build: Callable[[], nn.Module],
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Any:
    """Load a checkpoint by a strategy, as a worker asks for it, in phases that nobody measures."""
    phases: Any = SimpleNamespace(phase=lambda _: nullcontext())
    given = MappingProxyType(options)
    asked = loading.Load(path, torch.device(device), dtype, given, spec, build, phases)
    return loading.import_strategy(registry.strategy(name).path)(asked)


def checked_load(
    spec: ModelSpec,
    path: Path,
    manifest: Manifest,
    dtype: torch.dtype,
    strategy: str,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Load a checkpoint by a strategy, check structure and values as a worker does, and return the tensors."""
    model = load(strategy, path, resolve_builder(spec.builder), spec, dtype, **options)
    tensors = verify.named_tensors(model)
    verify.check_structure(tensors, manifest, torch.device("cpu"), dtype)
    verify.check_values(verify.touch(tensors), manifest, dtype)
    return tensors


HALVES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model(nn.Module):
    """A tied head, a persistent mask and a step count that is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.arange(4.0))
        self.register_buffer("step", torch.tensor(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def manifest_of(model: nn.Module, others: Iterable[str] = ()) -> Manifest:
    """Return the manifest of the values that a model has."""

    def entry(name: str, tensor: torch.Tensor) -> TensorEntry:
        own = str(tensor.dtype).removeprefix("torch.")
        kinds = HALVES if tensor.is_floating_point() else {own: tensor.dtype}
        sums = {kind: checksum(tensor.to(dtype)) for kind, dtype in kinds.items()}
        shared_with = "embedding.weight" if name == "head.weight" else None
        return TensorEntry(
            name, (*tensor.shape,), own, tensor.nbytes, "parameter", shared_with, sums
        )

    tensors = verify.named_tensors(model, others)
    return Manifest("m", "a:b", "seed 0", tuple(entry(*item) for item in tensors.items()))
