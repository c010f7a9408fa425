"""Rename a checkpoint's tensors to the names in a model of transformers.

``from_pretrained`` renames keys, adds or removes the prefix of the base model, and converts groups
of tensors. For example, it stacks the experts of a layer, or joins q, k and v. This module uses
transformers' own tables and functions. A stacked or joined tensor becomes a ``TensorSlice`` with
several ``parts``, each of which the loader reads directly into the model's tensor. For any other
conversion, the loader reads the values and transformers converts them.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weighin.formats.base import Part, Slices, TensorSlice, row_major
from weighin.formats.foreign import lacks, misfit
from weighin.models import pretrained
from weighin.models.pretrained import computed_keys
from weighin.models.pretrained_modules import module_for
from weighin.models.pretrained_names import ModelNames


@dataclass(frozen=True, slots=True)
class Conversion:
    """A group of a file's tensors that transformers converts to one or several tensors of the model.

    Attributes:
        name: the name of the first result in the model.
        converter: transformers' ``WeightConverter``.
        sources: the file's tensors, each with the pattern of the converter that matches its name.
    """

    name: str
    converter: Any
    sources: list[tuple[str, TensorSlice]] = field(default_factory=list)

    def apply(self, model: Any, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert ``tensors``, the values of ``sources``, and return the results by name."""
        converter = deepcopy(self.converter)
        for (pattern, source), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.name, source.name, pattern, tensor)
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def targets(self, model: Any) -> list[str]:
        """Return the results' names; to find several names, convert tensors without values."""
        if len(self.converter.target_patterns) == 1:
            return [self.name]
        empty = [
            torch.empty(source.shape, dtype=source.dtype, device="meta")
            for _, source in self.sources
        ]
        return list(self.apply(model, empty))


@dataclass(frozen=True, slots=True)
class MappedKeys:
    """The tensors of a checkpoint under a model's names.

    Attributes:
        slices: the tensors whose values need no conversion.
        conversions: the groups of tensors whose values must be converted.
        unexpected: keys of the file that the model does not have, which ``from_pretrained`` ignores.
        renamed: the number of keys whose name in the file differs from the name in the model.
        joined: the number of keys of the file whose tensors are joined or otherwise converted.
        computed: the model's keys that the file lacks because the class computes their values.
        used: which entries of transformers' tables renamed or converted a tensor; None for another
            library, and for a GGUF file.
    """

    slices: Slices
    conversions: tuple[Conversion, ...]
    unexpected: tuple[str, ...]
    renamed: int
    joined: int
    computed: tuple[str, ...]
    used: tuple[Any, ...] | None

    def refuse_missing(self, model: torch.nn.Module, checkpoint: Path) -> None:
        """Raise CheckpointError if ``from_pretrained`` would initialise a weight with random numbers.

        The checkpoint may lack buffers, computed or converted tensors, and names of tied weights.
        """
        wanted = model.state_dict(keep_vars=True)
        present = {source.name for source in self.slices}
        present |= {name for one in self.conversions for name in one.targets(model)}
        values = {id(wanted[name]) for name in present if name in wanted}
        values |= {id(buffer) for buffer in model.buffers()}
        values |= {id(wanted[name]) for name in self.computed}
        missing = sorted(name for name, tensor in wanted.items() if id(tensor) not in values)
        if missing:
            raise lacks(checkpoint, missing, type(model).__name__)

    def refuse_other_shapes(self, model: torch.nn.Module, checkpoint: Path) -> None:
        """Raise CheckpointError if a tensor of the file has another shape than in ``model``."""
        wanted = model.state_dict(keep_vars=True)
        others = [one.name for one in self.slices if one.shape != wanted[one.name].shape]
        if others:
            raise misfit(checkpoint, type(model).__name__, {"of another shape": others})

    @property
    def note(self) -> str:
        """A text that counts the keys for each difference of file and model; empty for none."""
        counts = {
            "converted": self.joined,
            "renamed": self.renamed,
            "left out": len(self.unexpected),
            "computed": len(self.computed),
        }
        return " and ".join(
            f"{count} {'key' if count == 1 else 'keys'} {what}"
            for what, count in counts.items()
            if count
        )


def map_keys(model: Any, slices: Sequence[TensorSlice]) -> MappedKeys:
    """Return a checkpoint's tensors under the names of a transformers, diffusers or timm model."""
    library = module_for(model)
    if library not in (None, pretrained):
        return _renamed(model, slices, library.named_as_in(model, slices))
    from transformers.core_model_loading import dot_natural_key

    known = ModelNames(model)
    wanted = known.wanted
    groups: dict[str, Conversion] = {}
    mapped = Slices()
    unexpected = []
    for source in sorted(slices, key=lambda one: dot_natural_key(one.name)):
        name, pattern = known.of(source.name)
        if name not in wanted:
            unexpected.append(source.name)
        elif pattern is None:
            mapped.append(replace(source, name=name))
        else:
            group = groups.setdefault(name, Conversion(name, known.by_pattern[pattern]))
            group.sources.append((pattern, source))
    own = {source.name for source in slices}
    renamed = sum(source.name not in own for source in mapped)
    conversions = []
    for group in groups.values():
        if (joined := _joined(group)) is None:
            conversions.append(group)
        else:
            mapped.append(joined)
    present = {source.name for source in mapped} | groups.keys()
    return MappedKeys(
        mapped,
        tuple(conversions),
        tuple(unexpected),
        renamed,
        joined=sum(len(group.sources) for group in groups.values()),
        computed=tuple(sorted(computed_keys(model) - present)),
        used=known.used(),
    )


def _renamed(
    model: torch.nn.Module, slices: Sequence[TensorSlice], named: Mapping[str, TensorSlice]
) -> MappedKeys:
    """Return the tensors of ``named`` whose keys are names of the model's tensors."""
    wanted = model.state_dict(keep_vars=True)
    mapped = Slices(replace(each, name=name) for name, each in named.items() if name in wanted)
    used = {named[each.name].name for each in mapped}
    unexpected = tuple(each.name for each in slices if each.name not in used)
    renamed = sum(name != each.name for name, each in named.items() if name in wanted)
    return MappedKeys(mapped, (), unexpected, renamed, joined=0, computed=(), used=None)


def _joined(conversion: Conversion) -> TensorSlice | None:
    """Return a stacked or joined tensor as a slice with ``parts``; None for other conversions."""
    tensors: dict[str, list[TensorSlice]] = {}
    for pattern, source in conversion.sources:
        if not source.contiguous or source.parts:
            return None
        tensors.setdefault(pattern, []).append(source)
    dtypes = {source.dtype_name for _, source in conversion.sources}
    if len(conversion.converter.target_patterns) != 1 or len(dtypes) != 1:
        return None
    blocks = {
        pattern: [_Blocks(one.shape, ((tuple(0 for _ in one.shape), one),)) for one in group]
        for pattern, group in tensors.items()
    }
    for operation in conversion.converter.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", None)
        if dim is None or dim < 0:
            return None
        if kind == "MergeModulelist":
            blocks = {pattern: [_stacked(group, dim)] for pattern, group in blocks.items()}
        elif kind == "Concatenate":
            order = [
                pattern for pattern in conversion.converter.source_patterns if pattern in blocks
            ]
            blocks = {order[0]: [_concatenated([b for p in order for b in blocks[p]], dim)]}
        else:
            return None
    results = [one for group in blocks.values() for one in group]
    return results[0].as_slice(conversion.name) if len(results) == 1 else None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A tensor's shape, and for each of its blocks its start in the tensor and its slice."""

    shape: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, ...], TensorSlice], ...]

    def as_slice(self, name: str) -> TensorSlice:
        first = self.blocks[0][1]
        if len(self.blocks) == 1:
            return replace(first, name=name)
        parts = tuple(Part(start, where) for start, where in self.blocks)
        return replace(
            first, name=name, shape=self.shape, stride=row_major(self.shape), parts=parts
        )


def _stacked(tensors: list[_Blocks], dim: int) -> _Blocks:
    """Join tensors of the same shape along a new dimension, as ``torch.stack`` does."""
    shape = tensors[0].shape
    blocks = tuple(
        (_with(start, dim, number), _with_dimension(where, dim))
        for number, tensor in enumerate(tensors)
        for start, where in tensor.blocks
    )
    return _Blocks(_with(shape, dim, len(tensors)), blocks)


def _concatenated(tensors: list[_Blocks], dim: int) -> _Blocks:
    """Join tensors along an existing dimension, as ``torch.cat`` does."""
    blocks, length = [], 0
    for tensor in tensors:
        for start, where in tensor.blocks:
            moved = (*start[:dim], start[dim] + length, *start[dim + 1 :])
            blocks.append((moved, where))
        length += tensor.shape[dim]
    shape = tensors[0].shape
    return _Blocks((*shape[:dim], length, *shape[dim + 1 :]), tuple(blocks))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])


def _with_dimension(where: TensorSlice, dim: int) -> TensorSlice:
    step = where.stride[dim] * where.shape[dim] if dim < len(where.shape) else 1
    return replace(where, shape=_with(where.shape, dim, 1), stride=_with(where.stride, dim, step))
