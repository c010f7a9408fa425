"""Give the tensors of a GGUF file the names and values that transformers gives them.

llama.cpp renames a model's tensors, and reorders or changes the values of some. transformers has a table of
the names, and code that undoes the changes. weighin runs this code on row numbers: if it only moves
rows, the loader dequantises a few rows at a time into the model's tensor, else the whole tensor.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from math import prod
from typing import Any, Final

import torch

from weighin.errors import CheckpointError
from weighin.stream import gguf_files as gguf
from weighin.stream.slices import Checkpoint, Slice, row_major

_COLUMNS: Final = 3  # of the matrix of row numbers, because few numbers of heads are multiples of 3
# transformers' code that undoes llama.cpp's changes: it makes one tensor of the model from the values
# (arrays of NumPy) of the tensors of the file that belong to it.
Undo = Callable[[Sequence[Any]], torch.Tensor | None]


def map_gguf_keys(model: Any, slices: Sequence[Slice]) -> Checkpoint:
    """Return the tensors of a GGUF file under the names of ``model``, a model of transformers."""
    file = slices[0].file
    module: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    kind = module.TENSOR_PROCESSORS.get(gguf.architecture(file), module.TensorProcessor)
    processor = kind(config=module.load_gguf_checkpoint(file)["config"])
    names = module.get_gguf_hf_weights_map(model, processor)

    def undo(target: str, sources: Sequence[Slice], arrays: Sequence[Any]) -> torch.Tensor | None:
        made: dict[str, torch.Tensor] = {}
        for where, array in zip(sources, arrays, strict=True):
            result = processor.process(
                weights=array,
                name=where.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": made},
            )
            if (name := names.get(result.name)) is not None:
                made[name] = torch.from_numpy(result.weights)
        return made.get(target)

    wanted = model.state_dict(keep_vars=True)
    groups: dict[str, list[Slice]] = {}
    for where in slices:
        target = names.get(where.name) or names.get(where.name.removesuffix(".weight"))
        if target in wanted:
            groups.setdefault(target, []).append(where)
    found = Checkpoint()
    for name, sources in groups.items():
        shape, first = tuple(wanted[name].shape), sources[0]
        own = replace(first, name=name, shape=shape, stride=row_major(shape))
        undone = partial(undo, name, sources)
        moves = _moves(undone, shape, sources)
        if moves is None:  # values change, as those of norms do; transformers computes in float32
            own.dtype_name = "float32"
            own.fill = partial(_fill_whole, undone, name, sources)
        elif moves[0].size or moves[1] or len(sources) > 1 or first.encoding:
            own.fill = partial(_fill_by_rows, sources, *moves)
        if own.fill:
            own.encoding = first.encoding or first.dtype_name
        found.append(own)
    return found


def _moves(undo: Undo, shape: tuple[int, ...], sources: Sequence[Slice]) -> tuple[Any, bool] | None:
    """Return where transformers moves each row (an array of NumPy, empty if no row moves), and whether it
    transposes the tensor; None if transformers does more than moving rows.
    """
    import numpy as np

    columns = sources[0].shape[-1] if sources[0].shape else 0
    if not columns or any(where.shape[-1:] != (columns,) for where in sources):
        return None
    width = columns if len(shape) == 1 else _COLUMNS
    counts = [prod(where.shape[:-1]) for where in sources]
    # From 1, because 0 marks a row to which nothing was moved.
    numbers = np.arange(width, (sum(counts) + 1) * width, dtype=np.int64).reshape(-1, width)
    each = np.split(numbers, np.cumsum(counts)[:-1])
    probes = [
        one.reshape(*where.shape[:-1], width) for one, where in zip(each, sources, strict=True)
    ]
    made = None
    with suppress(ArithmeticError, LookupError, TypeError, ValueError):
        made = undo(probes)
    if made is None or made.dtype != torch.int64:
        return None
    is_turned = made.shape == (width, len(numbers)) and shape == (columns, len(numbers))
    if not is_turned and (made.shape != (*shape[:-1], width) or columns != shape[-1]):
        return None
    rows: Any = (made.T if is_turned else made).numpy().reshape(-1, width)
    targets = np.argsort(rows[:, 0])
    if not np.array_equal(rows[targets], numbers):  # not whole rows, each of them once
        return None
    return targets[:0] if np.array_equal(rows, numbers) else targets, is_turned


def _fill_whole(undo: Undo, target: str, sources: Sequence[Slice], memory: torch.Tensor) -> None:
    values = [torch.cat([*gguf.rows(where)]).reshape(where.shape).numpy() for where in sources]
    made = undo(values)
    if made is None or made.shape != memory.shape:
        found = "nothing" if made is None else f"the shape {tuple(made.shape)}"
        raise CheckpointError(
            f"{sources[0].file}: transformers makes {found} of {sources[0].name!r}, but the model's"
            f" {target!r} has the shape {tuple(memory.shape)}",
            "install another version of transformers",
        )
    memory.copy_(made)


def _fill_by_rows(
    sources: Sequence[Slice], targets: Any, is_turned: bool, memory: torch.Tensor
) -> None:
    flat = (memory.T if is_turned else memory).view(-1, sources[0].shape[-1])
    start = 0
    for values in chain.from_iterable(map(gguf.rows, sources)):
        stop = start + len(values)
        if targets.size:
            places = torch.from_numpy(targets[start:stop]).to(flat.device)
            flat[places] = values.to(flat.device, flat.dtype)
        else:
            flat[start:stop] = values.to(flat.device)
        start = stop
