"""The steps of the conversions that weighin makes itself: of bitsandbytes, GPTQ and AWQ.

The tables of a matrix (its scales and zero points) are small. They are read once, and each step gets
its part of them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any, Final

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.conversion_steps import PIECE_ELEMENTS, Divide, Step, of_rows, rows_in, rows_of
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

_WORD_BITS: Final = 32
_GPTQ_BITS: Final = (2, 3, 4, 8)


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
    """Return the steps of a matrix whose inputs are rows of words: each input takes ``bits`` of each column."""
    outputs, inputs = target.shape
    unit = _WORD_BITS // gcd(_WORD_BITS, bits)  # the inputs that whole words hold
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


OF_OWN: Final[Mapping[str, Divide]] = {
    DequantiseInt8.__name__: _of_int8,
    DequantiseFourBits.__name__: _of_four_bits,
    DequantiseGptq.__name__: _of_gptq,
    DequantiseAwq.__name__: _of_awq,
}
