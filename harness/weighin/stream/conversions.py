"""Fill the results of conversions of transformers piece by piece, with transformers' own arithmetic.

``WeightConverter.convert`` takes whole tensors, so that the experts and their stack, or codes, float32
values and weights, are in memory at the same time. Here, each expert is read into its part of the
stack, and fp8 and MXFP4 are dequantised some rows at a time, by the operation's own function. Any
other operation is left to transformers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import pad

from weighin.stream.bytes import Reader, allocate, memory_of
from weighin.stream.slices import Fill, Slice, dtype_name, row_major

if TYPE_CHECKING:
    from weighin.stream.transformers_reader import Lazy

    Lazies = Mapping[str, Sequence[Lazy]]

# Elements that are computed at once: so few that the C library keeps little freed memory.
PIECE_ELEMENTS: Final = 64 * 1024
Filled = tuple[torch.Tensor, list[Fill]]  # a tensor of the model, and what is to fill its parts


class _LibraryAloneError(Exception):
    """Only transformers knows how to convert these tensors."""


def in_place(converter: Any, layer_name: str, model: Any, lazies: "Lazies") -> Filled | None:
    """Return memory for a ``WeightConverter``'s result; None: transformers has to compute it."""
    if len(converter.target_patterns) != 1:
        return None
    operations = list(converter.operations)
    kinds = [type(operation).__name__ for operation in operations]
    try:
        if kinds[0] == "Fp8Dequantize":
            lazies = _of_fp8(operations.pop(0), layer_name, model, lazies)
        elif kinds == ["Mxfp4Dequantize"]:
            operations.clear()
            lazies = _of_mxfp4(layer_name, model, lazies)
        return _placed(
            operations, [lazies[name] for name in converter.source_patterns if lazies.get(name)]
        )
    except _LibraryAloneError:
        return None


def _placed(operations: Sequence[Any], groups: Sequence[Sequence["Lazy"]]) -> Filled:
    """Return the result of stacking, or of stacking and joining, with the places of the tensors in it."""
    first, *others = (lazy for group in groups for lazy in group)
    kinds = [type(operation).__name__ for operation in operations]
    if not (kinds or others):
        out = allocate(prod(first.shape), first.dtype, first.device).view(first.shape)
        return out, [Fill(first.where, out)]
    is_stack = kinds == ["MergeModulelist"] and len(groups) == 1
    is_join = kinds == ["MergeModulelist", "Concatenate"]  # such as the stacks of gate and up
    if not (is_stack or is_join) or any(lazy.dtype != first.dtype for lazy in others):
        raise _LibraryAloneError
    stack, join = operations[0].dim, operations[-1].dim
    try:
        stacks = [
            torch.stack([torch.empty(lazy.where.shape, device="meta") for lazy in group], stack)
            for group in groups
        ]
        whole = torch.cat(stacks, join) if is_join else stacks[0]
    except (IndexError, RuntimeError):  # transformers raises the error
        raise _LibraryAloneError from None
    out = allocate(whole.numel(), first.dtype, first.device).view(whole.shape)
    fills, at = list[Fill](), 0
    for group, stacked in zip(groups, stacks, strict=True):
        joined = out.narrow(join, at, stacked.shape[join])
        fills += [Fill(lazy.where, joined.select(stack, n)) for n, lazy in enumerate(group)]
        at += stacked.shape[join]
    return out, fills


def _computed(
    lazy: "Lazy", shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[torch.Tensor], None]
) -> "Lazy":
    """Return a tensor of the file whose values a function computes."""
    name = dtype_name(dtype)
    where = replace(lazy.where, shape=shape, stride=row_major(shape), dtype_name=name, fill=fill)
    return replace(lazy, where=where, dtype=dtype)


def _rows(where: Slice, first: int, last: int) -> Slice:
    """Return the rows from ``first`` to before ``last`` of a contiguous tensor."""
    offset = where.offset + first * (where.nbytes // max(1, where.shape[0]))
    return replace(where, shape=(last - first, *where.shape[1:]), offset=offset)


def _read(reader: Reader, where: Slice) -> torch.Tensor:
    """Read a contiguous tensor of the file."""
    out = torch.empty(where.shape, dtype=where.dtype)
    if out.nbytes:
        reader.read(where.file, memory_of(out), where.offset)
    return out


def _of_fp8(operation: Any, layer_name: str, model: Any, lazies: "Lazies") -> "Lazies":
    if not (hasattr(operation, "_get_target_dtype") and hasattr(operation, "_dequantize_one")):
        raise _LibraryAloneError
    dtype = operation._get_target_dtype(model, layer_name)
    made = {}
    for name, group in lazies.items():
        if "activation_scale" in name or "weight_scale_inv" in name:
            continue
        scales = lazies.get(f"{name}_scale_inv")
        if scales is None:  # not quantised
            made[name] = group
        elif len(scales) != len(group) or dtype is None:
            raise _LibraryAloneError
        else:
            made[name] = [_fp8(operation, dtype, *pair) for pair in zip(group, scales, strict=True)]
    return made


def _fp8(operation: Any, dtype: torch.dtype, codes: "Lazy", scale: "Lazy") -> "Lazy":
    """Return the weights of one matrix of codes, to be computed some rows at a time.

    transformers divides a matrix equally among its scales. If the last block of rows or columns is
    smaller than the others, each code would get a wrong scale, or transformers fails. Here such rows
    are computed alone, and such columns are padded with zeros, which are cut off again.
    """
    where, grid = codes.where, scale.where.shape
    is_cast = codes.dtype != where.dtype or scale.dtype != scale.where.dtype
    if is_cast or len(where.shape) != 2 or not (where.contiguous and scale.where.contiguous):
        raise _LibraryAloneError
    in_byte = 2 if where.dtype_name in ("int8", "float4_e2m1fn_x2") else 1
    rows, columns = where.shape[0], where.shape[1] * in_byte
    unit, width = rows, columns  # of a block, and of all blocks
    if len(grid) == 2 and 0 not in grid:
        quantiser = getattr(operation, "hf_quantizer", None)
        sizes = getattr(getattr(quantiser, "quantization_config", None), "weight_block_size", None)
        unit = _block(rows, grid[0], sizes and sizes[0])
        width = _block(columns, grid[1], sizes and sizes[1]) * grid[1]
    elif prod(grid) != 1:
        raise _LibraryAloneError
    missing = (width - columns) // in_byte

    def fill(out: torch.Tensor) -> None:
        with closing(Reader()) as reader, torch.no_grad():
            scales = _read(reader, scale.where)
            for first, last in _whole_blocks(rows, unit, PIECE_ELEMENTS // max(1, width)):
                part = _read(reader, _rows(where, first, last))
                if missing:
                    part = pad(part.view(torch.uint8), (0, missing)).view(part.dtype)
                has_rows = len(grid) == 2 and grid[0] > 1
                some = scales[first // unit : -(-last // unit)] if has_rows else scales
                values = operation._dequantize_one(part, some, output_dtype=dtype)
                out[first:last] = values[:, :columns]

    return _computed(codes, (rows, columns), dtype, fill)


def _block(size: int, count: int, named: int | None) -> int:
    """Return the size of each of ``count`` blocks of a dimension; the last may be smaller."""
    if named and 1 < count == -(-size // named):
        return named
    if not size or size % count:
        raise _LibraryAloneError  # transformers raises the error
    return size // count


def _whole_blocks(rows: int, unit: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of about ``step`` rows: whole blocks of ``unit`` rows, or a part of one block."""
    first, step = 0, max(1, step)
    while first < rows:
        left = unit - first % unit
        last = first + (min(step, left) if step <= unit else step // unit * unit)
        if last > rows:  # the last block may be smaller than the others
            last = rows - rows % unit if rows - rows % unit > first else rows
        yield first, last
        first = last


def _of_mxfp4(layer_name: str, model: Any, lazies: "Lazies") -> "Lazies":
    """Return how to compute the weights of all experts from MXFP4, whose rows become columns."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = {name.rpartition("_")[2].rstrip("$"): group for name, group in lazies.items()}
    if set(found) != {"blocks", "scales"} or any(len(group) != 1 for group in found.values()):
        raise _LibraryAloneError
    (lazy,) = found["blocks"]
    blocks, scales = lazy.where, found["scales"][0].where
    fits = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape
    if not (fits and blocks.contiguous and scales.contiguous):
        raise _LibraryAloneError
    module, _, leaf = layer_name.rpartition(".")
    dtype = getattr(model.get_submodule(module), leaf).dtype
    experts, rows, groups, size = blocks.shape
    step = max(1, PIECE_ELEMENTS // max(1, 2 * groups * size))

    def fill(out: torch.Tensor) -> None:
        with closing(Reader()) as reader, torch.no_grad():
            for expert, first in product(range(experts), range(0, rows, step)):
                last = min(first + step, rows)
                some = []
                for one in (blocks, scales):
                    matrix = _rows(one, expert, expert + 1)
                    matrix = replace(matrix, shape=one.shape[1:], stride=one.stride[1:])
                    some.append(_read(reader, _rows(matrix, first, last))[None])
                out[expert, :, first:last] = convert_moe_packed_tensors(*some, dtype=dtype)[0]

    made = _computed(lazy, (experts, 2 * groups * size, rows), dtype, fill)
    return {next(iter(lazies)): [made]}
