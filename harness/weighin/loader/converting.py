"""Convert a group of a file's tensors to a tensor of a model, piece by piece where that is possible.

transformers converts whole tensors: the codes, values in float32 and the result are in memory together.
Most conversions that dequantise compute each row, or each expert, by itself. Such a conversion runs on
a few rows after the other, with the same operations, and each result is copied to its place in the
model. Every other conversion runs on whole tensors.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch

from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice
from weighin.formats.misfit import plain
from weighin.loader import smaller_blocks
from weighin.loader.conversion_steps import (
    PIECE_ELEMENTS,
    Divide,
    Source,
    Step,
    of_rows,
    rows_in,
    rows_of,
)
from weighin.loader.direct_io import PieceReader
from weighin.loader.fill import cache_threads, one_thread_each
from weighin.loader.huge_pages import memory_of
from weighin.loader.lazy_state import read_whole
from weighin.loader.own_steps import OF_OWN
from weighin.models.own_dequantiser import Operation
from weighin.models.pretrained_keys import Conversion

_WORD_BITS: Final = 32  # compressed-tensors packs zero points along the rows into words
_PACKED_BITS: Final = frozenset({4, 8})


def convert(
    model: Any, conversions: Sequence[Conversion], targets: dict[str, torch.Tensor]
) -> None:
    """Fill the targets of conversions with their results.

    Args:
        targets: the tensors to fill, by their names in ``model``. Their dtypes are those of the results.

    Raises:
        CheckpointError: a result has another shape than its target, or the conversion fails.
    """
    sliced: list[tuple[Conversion, Iterable[Step]]] = []
    for one in conversions:
        steps = _steps(one, _oriented(model, one, targets[one.name]))
        if steps is None:
            if smaller_blocks.has_smaller(
                one.sources, smaller_blocks.sizes_of(one.converter.operations[0])
            ):
                raise _cannot_divide(one)
            convert_whole(model, one, targets)
        else:
            sliced.append((one, steps))
    if sliced:
        fill_in_steps(model, sliced, targets)


def fill_in_steps(
    model: Any,
    sliced: Sequence[tuple[Conversion, Iterable[Step]]],
    targets: dict[str, torch.Tensor],
) -> None:
    """Fill the targets of conversions step by step, on several threads."""
    work = ((one, step) for one, steps in sliced for step in steps)
    lock = threading.Lock()

    def take() -> tuple[Conversion, Step] | None:
        with lock:
            return next(work, None)

    def run() -> None:
        with torch.no_grad(), closing(PieceReader()) as reader:
            for one, step in iter(take, None):
                target = _oriented(model, one, targets[one.name])
                _convert_step(model, one, step, target, reader)

    threads = cache_threads()
    with one_thread_each, ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run) for _ in range(threads)]:
            future.result()


def convert_whole(model: Any, one: Conversion, targets: dict[str, torch.Tensor]) -> None:
    """Fill the targets of a conversion with its results, computed from whole tensors."""
    tensors = [read_whole(source) for _, source in one.sources]
    if not one.reads_codes:
        tensors = [tensor.to(targets[one.name].dtype) for tensor in tensors]
    with torch.no_grad():
        for name, value in one.apply(model, tensors).items():
            target = _oriented(model, one, targets[name])
            _check(one, value, target)
            target.copy_(value)


def _convert_step(
    model: Any, one: Conversion, step: Step, target: torch.Tensor, reader: PieceReader
) -> None:
    collected: dict[str, Any] = {pattern: [value] for pattern, value in step.given.items()}
    for pattern, source in step.sources:
        collected.setdefault(pattern, []).append(_read(reader, source))
    converter = one.converter
    for operation in converter.operations:
        collected = smaller_blocks.convert(
            operation,
            collected,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=one.name,
            model=model,
            config=model.config,
        )
    (made,) = collected.values()
    value = made[0] if isinstance(made, list) else made
    part = target[step.place]
    _check(one, value, part)
    part.copy_(value)


def _check(one: Conversion, value: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse what ``copy_`` would expand or cast without a word."""
    if (value.shape, value.dtype) != (target.shape, target.dtype) and one.reads_codes:
        kind, wanted = (f"{tuple(each.shape)} of {each.dtype}" for each in (value, target))
        raise CheckpointError(
            f"{one.sources[0][1].file}: the codes of {plain(one.name)} become {kind}, and the model has {wanted}",
            "choose the class that the checkpoint was saved from, or correct quantization_config",
        )


def _cannot_divide(one: Conversion) -> CheckpointError:
    name, codes = plain(one.name), one.sources[0][1]
    return CheckpointError(
        f"{codes.file}: {name} has a smaller last block, and its codes have gaps between them:"
        " transformers takes the smaller block for an equal one, and gives wrong values",
        "save the codes as contiguous tensors",
    )


def _read(reader: PieceReader, source: TensorSlice) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=source.dtype)
    if source.nbytes:
        reader.read(source.file, memory_of(target), source.offset)
    return target


def _steps(one: Conversion, target: torch.Tensor) -> Iterable[Step] | None:
    """Return the steps of a conversion; None if it must run on whole tensors."""
    if not one.reads_codes or not all(_is_plain(source) for _, source in one.sources):
        return None
    first, *rest = one.converter.operations
    kind = type(first).__name__
    if rest:
        return _of_experts(one, kind, rest, target)
    sources = dict(one.sources)
    if len(sources) == len(one.sources) and (steps := _OF_ROWS.get(kind)):
        sizes = smaller_blocks.sizes_of(first)
        return _of_fp8(sources, target, sizes) if sizes else steps(sources, target)
    return None


def _oriented(model: Any, one: Conversion, target: torch.Tensor) -> torch.Tensor:
    """Return the target as the matrix of a Linear: transformers' Conv1D, of GPT-2, has it transposed."""
    module = model.get_submodule(one.name.rpartition(".")[0])
    of_linear = isinstance(one.converter.operations[0], Operation)
    return target.t() if of_linear and type(module).__name__ == "Conv1D" else target


def _is_plain(source: TensorSlice) -> bool:
    return source.contiguous and not source.parts and not source.encoding


def _of_experts(
    one: Conversion, kind: str, rest: Sequence[Any], target: torch.Tensor
) -> Iterable[Step] | None:
    """Return a step for each expert, where the operations stack experts and join their matrices."""
    merge, *joins = rest
    stacks = type(merge).__name__ == "MergeModulelist" and merge.dim == 0
    joined = all(type(each).__name__ == "Concatenate" and each.dim > 0 for each in joins)
    by_pattern: dict[str, list[TensorSlice]] = {}
    for pattern, source in one.sources:
        by_pattern.setdefault(pattern, []).append(source)
    counts = {len(group) for group in by_pattern.values()}
    if kind not in _OF_ROWS or not (stacks and joined) or counts != {len(target)}:
        return None
    return (
        Step(
            tuple((pattern, group[number]) for pattern, group in by_pattern.items()),
            (slice(number, number + 1),),
        )
        for number in range(len(target))
    )


def _of_fp8(
    sources: dict[str, TensorSlice], target: torch.Tensor, sizes: tuple[int, ...] = ()
) -> Iterable[Step] | None:
    """Fp8Dequantize: the rows of codes are divided equally among the rows of scales."""
    codes, scales = sources.get("weight"), sources.get("weight_scale_inv")
    if codes is None or scales is None or len(codes.shape) != 2 or target.ndim != 2:
        return None
    of_scales = scales.shape[0] if len(scales.shape) == 2 else 1
    in_blocks = smaller_blocks.whole_sizes(codes.shape, scales.shape, sizes)[0]
    if not of_scales or in_blocks % of_scales:
        return None  # transformers says what is wrong
    rows, block = codes.shape[0], in_blocks // of_scales

    def part(first: int, last: int) -> tuple[Source, ...]:
        above, below = first // block, -(-last // block)
        scale = rows_of(scales, above, below) if of_scales > 1 else scales
        return ("weight", rows_of(codes, first, last)), ("weight_scale_inv", scale)

    if block * codes.shape[1] <= PIECE_ELEMENTS and in_blocks == rows:
        return of_rows(range(rows), block, codes.shape[1], part)
    blocks = (range(first, min(first + block, rows)) for first in range(0, rows, block))
    return (step for one in blocks for step in of_rows(one, 1, codes.shape[1], part))


def _of_compressed(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterable[Step] | None:
    """CompressedTensorsDequantize: one scale for a matrix, for each row, or for each group of a row."""
    codes = sources.get("weight_packed") or sources.get("weight")
    scales, zeros = sources.get("weight_scale"), sources.get("weight_zero_point")
    if codes is None or scales is None or len(codes.shape) != 2 or target.ndim != 2:
        return None
    rows, columns = target.shape
    packed = "weight_packed" in sources
    if packed and codes.shape[1] * _WORD_BITS not in {columns * bits for bits in _PACKED_BITS}:
        return None
    in_rows = {name for name, one in sources.items() if one.shape and one.shape[0] == rows}
    if prod(scales.shape) != 1 and "weight_scale" not in in_rows:
        return None
    if zeros is not None and (
        packed or ("weight_zero_point" in in_rows) != ("weight_scale" in in_rows)
    ):
        return None
    if rows == 1:
        return None

    def part(first: int, last: int) -> tuple[Source, ...]:
        return tuple(
            (name, rows_of(one, first, last) if name in in_rows else one)
            for name, one in sources.items()
            if name != "weight_shape"
        )

    steps = of_rows(range(rows), _WORD_BITS, columns, part)

    def of_part(step: Step) -> Mapping[str, torch.Tensor]:
        shape = torch.tensor((rows_in(step), columns))
        return {"weight_shape": shape} if "weight_shape" in sources else {}

    return (replace(step, given=of_part(step)) for step in steps)


def _of_mxfp4(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterable[Step] | None:
    """Mxfp4Dequantize: the rows of each expert's codes become its columns."""
    named = {name.rpartition("_")[2]: (name, where) for name, where in sources.items()}
    if named.keys() != {"blocks", "scales"} or target.ndim != 3:
        return None
    (blocks_name, blocks), (scales_name, scales) = named["blocks"], named["scales"]
    if len(blocks.shape) != 4 or blocks.shape[:3] != scales.shape:
        return None
    experts, rows = blocks.shape[:2]
    many = max(1, PIECE_ELEMENTS // max(1, 2 * prod(blocks.shape[2:])))
    return (
        Step(
            (
                (blocks_name, _within(blocks, expert, first, min(first + many, rows))),
                (scales_name, _within(scales, expert, first, min(first + many, rows))),
            ),
            (slice(expert, expert + 1), slice(None), slice(first, min(first + many, rows))),
        )
        for expert in range(experts)
        for first in range(0, rows, many)
    )


_OF_ROWS: Final[Mapping[str, Divide]] = {
    "Fp8Dequantize": _of_fp8,
    "CompressedTensorsDequantize": _of_compressed,
    "Mxfp4Dequantize": _of_mxfp4,
    **OF_OWN,
}
"""The operations that compute each row, or each block of rows, by itself."""


def _within(where: TensorSlice, number: int, first: int, last: int) -> TensorSlice:
    """Return some rows of one matrix of a stack of them, as a stack of one."""
    one = rows_of(where, number, number + 1)
    inner = replace(one, shape=one.shape[1:], stride=one.stride[1:])
    rows = rows_of(inner, first, last)
    return replace(rows, shape=(1, *rows.shape), stride=(prod(rows.shape), *rows.stride))
