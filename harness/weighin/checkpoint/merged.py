"""Merge an adapter of LoRA into the tensors of a checkpoint that is being written."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin.checkpoint.reader import read_into
from weighin.formats.base import TensorSlice
from weighin.formats.dtypes import dtype_name
from weighin.formats.lora import Addition
from weighin.loader import merge


def merged(
    model: Any, sources: Mapping[str, TensorSlice], adapter: Path, dtype: torch.dtype | None
) -> dict[str, TensorSlice]:
    """Return the tensors of a model, of which those that the adapter changes are computed one by one.

    Args:
        model: the model, of which no values are needed.
        sources: the places of its tensors, by their names.
        dtype: the dtype in which the tensors are merged; None for the dtype of each.

    Raises:
        CheckpointError: the adapter is damaged, is not plain LoRA, or does not fit the model.
    """
    changed = dict(sources)
    wanted = model.state_dict(keep_vars=True)
    for one, module in merge.modules_of(model, adapter):
        names = [name for name, tensor in wanted.items() if tensor is module.weight]
        base = one.base or sources[names[0]]
        kind = dtype or sources[names[0]].dtype
        fill = partial(_fill, base, one, is_turned=merge.is_turned(one, module))
        for name in names:
            changed[name] = replace(
                base,
                name=name,
                stride=module.weight.stride(),
                dtype_name=dtype_name(kind),
                parts=(),
                encoding="",
                fill=fill,
            )
    return changed


def _fill(base: TensorSlice, one: Addition, memory: torch.Tensor, *, is_turned: bool) -> None:
    """Write the values of ``base`` and the adapter's product into ``memory``."""
    if base.fill:
        base.fill(memory)
    else:
        read_into(base, memory)
    with torch.no_grad():
        merge.add(one, memory, torch.empty(merge.elements(one)), is_turned=is_turned)
