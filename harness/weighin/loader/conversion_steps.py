"""Divide the dequantisation of a tensor into steps that each compute some rows of the result.

A quantised matrix consists of codes, scales and zero points. For 4-bit bitsandbytes, GPTQ and AWQ,
the scales and zero points are read once for all steps. Otherwise each step reads those of its rows.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any, Final

import torch

from weighin.formats.base import TensorSlice
from weighin.loader import smaller_blocks
from weighin.loader.lazy_state import read_whole
from weighin.models.own_dequantiser import (
    WEIGHT,
    DequantiseAwq,
    DequantiseFourBits,
    DequantiseGptq,
    DequantiseInt8,
    even_groups,
    fitting,
    scales_of,
    state_of,
)

# GPTQ, AWQ and compressed-tensors pack codes into integers of 32 bits.
_WORD_BITS: Final = 32
_GPTQ_BITS: Final = (2, 3, 4, 8)
_PACKED_BITS: Final = frozenset({4, 8})

PIECE_ELEMENTS: Final = 64 * 1024
"""The intended number of elements of one step, small so that the C library keeps little freed memory."""

Source = tuple[str, TensorSlice]
"""A pattern of transformers' ``WeightConverter``, and a tensor of the file whose name fits the pattern."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversion: it computes the part of the result with the index ``place``.

    ``sources`` are the ranges of the file that the step reads. ``given`` has further inputs, such as
    scales that are already in memory, by the names that the dequantising operation expects.
    """

    sources: tuple[Source, ...]
    place: tuple[slice, ...]
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)


Divide = Callable[[dict[str, TensorSlice], torch.Tensor], Iterable[Step] | None]
"""Takes the sources and the tensor to fill; returns the steps, or None if it cannot divide the tensor."""


def of_rows(
    rows: range, unit: int, columns: int, part: Callable[[int, int], tuple[Source, ...]]
) -> Iterator[Step]:
    """Yield steps, each with a multiple of ``unit`` rows and at most ``PIECE_ELEMENTS`` elements.

    A step has at least ``unit`` rows, however large they are, but the last step may have fewer rows.
    ``part(first, last)`` returns the sources of the rows from ``first`` to before ``last``.
    """
    many = max(1, PIECE_ELEMENTS // max(1, unit * columns)) * unit
    for first in rows[::many]:
        last = min(first + many, rows.stop)
        yield Step(part(first, last), (slice(first, last),))


def rows_in(step: Step) -> int:
    return int(step.place[0].stop - step.place[0].start)


def rows_of(where: TensorSlice, first: int, last: int) -> TensorSlice:
    """Return the rows from ``first`` to before ``last`` of a contiguous tensor."""
    row_bytes = where.nbytes // where.shape[0]
    return replace(
        where, shape=(last - first, *where.shape[1:]), offset=where.offset + first * row_bytes
    )


def of_fp8(
    sources: dict[str, TensorSlice], target: torch.Tensor, sizes: tuple[int, ...] = ()
) -> Iterable[Step] | None:
    """Divide ``Fp8Dequantize``, in which one row of scales serves a fixed number of rows of codes."""
    codes, scales = sources.get("weight"), sources.get("weight_scale_inv")
    if codes is None or scales is None or len(codes.shape) != 2 or target.ndim != 2:
        return None
    of_scales = scales.shape[0] if len(scales.shape) == 2 else 1
    in_blocks = smaller_blocks.whole_sizes(codes.shape, scales.shape, sizes)[0]
    if not of_scales or in_blocks % of_scales:
        return None  # transformers then raises the error
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
    """Divide the conversion ``CompressedTensorsDequantize`` into steps of some rows each.

    The whole matrix, each row, or each group of columns in a row has one scale. The result is None for
    any other layout and for a matrix of one row.
    """
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
    """Divide ``Mxfp4Dequantize``, which turns the rows of each expert's codes into columns."""
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


def _within(where: TensorSlice, number: int, first: int, last: int) -> TensorSlice:
    """Return rows of matrix ``number`` in a stack of matrices, as a stack of one smaller matrix."""
    one = rows_of(where, number, number + 1)
    inner = replace(one, shape=one.shape[1:], stride=one.stride[1:])
    rows = rows_of(inner, first, last)
    return replace(rows, shape=(1, *rows.shape), stride=(prod(rows.shape), *rows.stride))


def _of_int8(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterable[Step] | None:
    codes, largest = sources.get(WEIGHT), sources.get("SCB")
    if codes is None or largest is None or codes.shape != target.shape:
        return None
    if largest.shape != codes.shape[:1] or not codes.nbytes:
        return None
    others = tuple((name, one) for name, one in sources.items() if one not in (codes, largest))
    rows, columns = codes.shape
    return of_rows(
        range(rows),
        1,
        columns,
        lambda first, last: (
            (WEIGHT, rows_of(codes, first, last)),
            ("SCB", rows_of(largest, first, last)),
            *others,
        ),
    )


def _of_four_bits(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterable[Step] | None:
    return _steps_of_four_bits(sources, target) if sources.keys() > {WEIGHT} else None


def _steps_of_four_bits(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterator[Step]:
    codes = sources[WEIGHT]
    tables = {name: read_whole(one) for name, one in sources.items() if name != WEIGHT}
    with fitting(codes.name):
        state = state_of(tables)
        block, shape = state["blocksize"], state["shape"]
        scales = scales_of(tables, state)
    if target.ndim != 2 or shape != [*target.shape] or 2 * codes.nbytes != target.numel():
        yield Step(tuple(sources.items()), (slice(None),))
        return
    columns = target.shape[1]
    (name,) = [name for name in sources if "quant_state" in name]
    of_bytes = replace(codes, dtype_name="uint8", shape=(codes.nbytes,), stride=(1,))
    texts: dict[int, torch.Tensor] = {}
    for step in of_rows(
        range(len(target)),
        block // gcd(block, columns),
        columns,
        lambda first, last: (
            (WEIGHT, rows_of(of_bytes, first * columns // 2, last * columns // 2)),
        ),
    ):
        rows, first = rows_in(step), step.place[0].start
        if rows not in texts:
            texts[rows] = _text(state | {"shape": [rows, columns]})
        blocks = slice(first * columns // block, -(-(first + rows) * columns // block))
        given = {
            name: texts[rows],
            "weight.absmax": scales[blocks],
            "weight.quant_map": tables["weight.quant_map"],
        }
        yield replace(step, given=given)


def _text(state: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)


def _of_gptq(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterable[Step] | None:
    words = sources.get("qweight")
    if words is None or target.ndim != 2 or len(words.shape) != 2 or not target.numel():
        return None
    bits, rest = divmod(words.shape[0] * _WORD_BITS, target.shape[1])
    if rest or bits not in _GPTQ_BITS:
        return None
    return _of_groups(sources, words, target, bits)


def _of_awq(sources: dict[str, TensorSlice], target: torch.Tensor) -> Iterable[Step] | None:
    words = sources.get("qweight")
    if words is None or target.ndim != 2 or words.shape[:1] != target.shape[1:]:
        return None
    return _of_groups(sources, words, target, _WORD_BITS) if target.numel() else None


def _of_groups(
    sources: dict[str, TensorSlice], words: TensorSlice, target: torch.Tensor, bits: int
) -> Iterable[Step] | None:
    """Return the steps of a GPTQ or AWQ matrix; None if it cannot be divided.

    In each column of ``words``, the codes for one input of the layer take ``bits`` bits.
    """
    outputs, inputs = target.shape
    unit = _WORD_BITS // gcd(_WORD_BITS, bits)  # the least number of inputs that fill whole words
    if not sources.keys() >= {"qzeros", "scales"} or inputs % unit:
        return None
    return _steps_of_groups(sources, words, range(inputs), unit, outputs, bits)


def _steps_of_groups(
    sources: dict[str, TensorSlice], words: TensorSlice, inputs: range, unit: int, outputs: int, bits: int
) -> Iterator[Step]:  # fmt: skip
    zeros, scales = read_whole(sources["qzeros"]), read_whole(sources["scales"])
    places = sources.get("g_idx")
    with fitting(words.name):
        groups = read_whole(places) if places else even_groups(len(inputs), len(scales))
    many = max(1, PIECE_ELEMENTS // (unit * outputs)) * unit
    for first in inputs[::many]:
        last = min(first + many, inputs.stop)
        with fitting(words.name):
            used, of_part = groups[first:last].unique(return_inverse=True)
            given = {
                "qzeros": zeros.index_select(0, used),
                "scales": scales.index_select(0, used),
                "g_idx": of_part,
            }
        part = rows_of(words, first * bits // _WORD_BITS, last * bits // _WORD_BITS)
        yield Step((("qweight", part),), (slice(None), slice(first, last)), given)


OF_ROWS: Final[Mapping[str, Divide]] = {
    "Fp8Dequantize": of_fp8,
    "CompressedTensorsDequantize": _of_compressed,
    "Mxfp4Dequantize": _of_mxfp4,
    DequantiseInt8.__name__: _of_int8,
    DequantiseFourBits.__name__: _of_four_bits,
    DequantiseGptq.__name__: _of_gptq,
    DequantiseAwq.__name__: _of_awq,
}
"""The function that divides each operation, by the operation's name.

Each of these operations computes every row, or every block of rows, independently of the others.
"""
