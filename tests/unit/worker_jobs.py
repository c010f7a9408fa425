"""What a strategy sees of its cell, outside of a worker, and the checks of a worker."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weighin.cell import ModelSpec
from weighin.checkpoint.manifest import Manifest
from weighin.stream.construct import resolve_builder
from weighin.suite import registry
from weighin.worker import loading


class NoPhases:
    """Phases that nobody measures."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def checked_load(
    spec: ModelSpec,
    path: Path,
    manifest: Manifest,
    dtype: torch.dtype,
    strategy: str,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Load a checkpoint by a strategy, check structure and values as a worker does, and return the tensors."""
    cpu, builder = torch.device("cpu"), resolve_builder(spec.builder)
    load = loading.Load(path, cpu, dtype, MappingProxyType(options), spec, builder, NoPhases())
    model = loading.import_strategy(registry.strategy(strategy).path)(load)
    tensors = loading.named_tensors(model)
    loading.check_structure(tensors, manifest, cpu, dtype)
    loading.check_values(loading.touch(tensors), manifest, dtype)
    return tensors
