"""Find quantised weights by the names of tensors: codes, and the scales that belong to the codes.

A library that quantises a model writes the codes of a weight under one name, and the scales under a
name with another suffix. This module has a table of the pairs of suffixes, and computes the number
of weights in a tensor of codes. Names and dtypes suffice to find codes, so that weighin also
recognises quantised weights in a single file without a configuration.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from weighin.formats.base import TensorSlice

_FLOAT8: Final = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_BYTES: Final = frozenset({"int8", "uint8"})
_WORDS: Final = frozenset({"int32", "uint32", "int64"})

Find = Callable[[str], TensorSlice | None]
"""A function that returns the tensor whose name has another suffix in place of the codes' own."""

Bits = int | None
"""The bits of one weight, as the configuration says; None if the configuration does not say."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A tensor of codes.

    Attributes:
        method: the quantisation method by the suffixes of the names, such as "mxfp4".
        scales: the name of the tensor with the scales of the codes.
        elements: the number of weights in the codes; None if the shapes do not determine it.
    """

    where: TensorSlice
    method: str
    scales: str
    elements: int | None


@dataclass(frozen=True, slots=True)
class _Pair:
    """The suffixes that a method gives to codes and their scales, and the dtypes of the codes."""

    method: str
    codes: str
    scales: str
    dtypes: frozenset[str]
    elements: Callable[[TensorSlice, Find, Bits], int | None]


def _each(codes: TensorSlice, _: Find, __: Bits) -> int:
    return prod(codes.shape)


def _halves(codes: TensorSlice, _: Find, __: Bits) -> int:
    return 2 * codes.nbytes


def _of_bits(codes: TensorSlice, _: Find, bits: Bits) -> int | None:
    return codes.nbytes * 8 // bits if bits else None


def _each_or_packed(codes: TensorSlice, find: Find, bits: Bits) -> int | None:
    """Return the number of weights. Each element is one code, but a uint8 packs codes of ``bits``
    bits, or of 4 bits if ``bits`` is None or 8 or more.
    """
    if codes.dtype_name == "uint8":
        return _of_bits(codes, find, bits if bits and bits < 8 else 4)
    return _each(codes, find, bits)


def _of_rows(codes: TensorSlice, find: Find, bits: Bits) -> int | None:
    """Return the number of weights; GPTQ packs along the first dimension, AWQ along the last."""
    scales, places = find(".scales"), find(".g_idx")
    if scales is None or not scales.shape or len(codes.shape) != 2:
        return None
    if scales.shape[-1] != codes.shape[-1]:
        return codes.shape[0] * scales.shape[-1]
    if places is not None:
        return prod(places.shape) * codes.shape[-1]
    return _of_bits(codes, find, bits)


def _of_codebooks(codes: TensorSlice, find: Find, _: Bits) -> int | None:
    books = find(".codebooks")
    if books is None or len(books.shape) != 4 or len(codes.shape) < 2:
        return None
    return prod(codes.shape[:2]) * prod(books.shape[2:])


def _unknown(_: TensorSlice, __: Find, ___: Bits) -> None:
    return None


_ANY: Final = _FLOAT8 | _BYTES | _WORDS | {"bfloat16", "float16", "float32", "int16"}
_PAIRS: Final = (
    _Pair("bitsandbytes (nf4)", "", ".quant_state.bitsandbytes__nf4", _ANY, _halves),
    _Pair("bitsandbytes (fp4)", "", ".quant_state.bitsandbytes__fp4", _ANY, _halves),
    _Pair("bitsandbytes (int8)", ".weight", ".SCB", _BYTES, _each),
    _Pair("mxfp4", "_blocks", "_scales", _BYTES, _halves),
    _Pair("gptq or awq", ".qweight", ".scales", _WORDS, _of_rows),
    _Pair("compressed-tensors", "_packed", "_scale", _WORDS | _BYTES, _of_bits),
    _Pair("torchao", "_qdata", "_scale", _ANY, _unknown),
    _Pair("aqlm", ".codes", ".codebooks", _ANY, _of_codebooks),
    _Pair("hqq", ".W_q", ".scale", _ANY, _of_bits),
    _Pair("quanto", "._data", "._scale", _FLOAT8 | _BYTES, _each_or_packed),
    _Pair("eetq", ".weight", ".weight_scales", _BYTES, _each),
    _Pair("mlx", ".weight", ".scales", _WORDS, _of_bits),
    _Pair("vptq", ".indices", ".centroids.weight", _ANY, _unknown),
    _Pair("scaled fp8", ".weight", ".scale_weight", _FLOAT8, _each),
    _Pair("fp8 in blocks", "", "_scale_inv", _FLOAT8 | _BYTES, _each_or_packed),
    _Pair("codes of 8 or fewer bits", "", "_scale", _FLOAT8 | _BYTES, _each_or_packed),
)  # fmt: skip
"""The first pair whose suffixes and dtype fit applies. Several libraries use the last pair."""

_COMPANION: Final = re.compile(
    r"(\w*_)?(scales?|scale_inv|scale_2|scale_weight|scale_input|scale_and_zero|zero_point|zeros?"
    r"|qzeros|g_idx|shape|SCB|weight_format|biases|qbiases|codebooks|meta|shift)"
)
"""Matches the last part of the name of a tensor that belongs to codes, such as "zero_point"."""


_SCALES: Final = tuple(pair.scales for pair in _PAIRS)


def find_codes(slices: Sequence[TensorSlice], bits: Bits = None) -> tuple[Codes, ...]:
    """Return the tensors of codes, in the order of ``slices``.

    A tensor counts as codes only if the method that has these suffixes stores codes in the tensor's
    dtype.
    """
    by_name = {one.name: one for one in slices}
    return tuple(_codes(by_name, bits))


def _codes(by_name: Mapping[str, TensorSlice], bits: Bits) -> Iterator[Codes]:
    scales = [name for name in by_name if name.endswith(_SCALES)]
    pairs = [pair for pair in _PAIRS if any(name.endswith(pair.scales) for name in scales)]
    if not pairs:
        return
    for name, where in by_name.items():
        for pair in pairs:
            if not name.endswith(pair.codes) or where.dtype_name not in pair.dtypes:
                continue
            beginning = name.removesuffix(pair.codes)
            if (scale := beginning + pair.scales) not in by_name:
                continue

            def find(suffix: str, beginning: str = beginning) -> TensorSlice | None:
                return by_name.get(beginning + suffix)

            yield Codes(where, pair.method, scale, pair.elements(where, find, bits))
            break


def companions(slices: Sequence[TensorSlice], codes: Sequence[Codes]) -> set[str]:
    """Return the names of all tensors that belong to codes, such as scales and zero points."""
    coded = {one.where.name for one in codes}
    owned = coded | {name.removesuffix("._data") for name in coded}
    modules = {name.rpartition(".")[0] for name in owned}
    beside = {one.scales for one in codes}
    for one in slices:
        module, _, last = one.name.rpartition(".")
        named_so = module in modules and _COMPANION.fullmatch(last)
        if one.name not in coded and (named_so or any(up in coded for up in _parents(one.name))):
            beside.add(one.name)
    return beside


def _parents(name: str) -> Iterator[str]:
    while (name := name.rpartition(".")[0]) != "":
        yield name
