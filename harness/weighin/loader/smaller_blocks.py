"""Let transformers dequantise fp8 matrices whose last blocks are smaller than the other blocks.

transformers divides a matrix equally among its scales. If the last block of rows or columns is smaller,
transformers gives wrong values or fails. The loader therefore pads the matrix with zeros to whole blocks
before the conversion, and cuts the padding off afterwards. Each quantised value is then multiplied by
the scale of its own block, as in the program of DeepSeek, which introduced the format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weighin.formats.base import TensorSlice

_OF_SCALES = "_scale_inv"


def sizes_of(operation: Any) -> tuple[int, ...]:
    """Return the numbers of rows and columns of a block, or () for an operation without blocks."""
    quantiser = getattr(operation, "hf_quantizer", None)
    sizes = getattr(getattr(quantiser, "quantization_config", None), "weight_block_size", None)
    return tuple(sizes or ())


def whole_sizes(
    shape: Sequence[int], scales: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of a matrix after padding to whole blocks.

    Args:
        scales: the shape of the matrix of scales, which has one scale for each block.
        sizes: the numbers of rows and columns of a block; empty for no padding.
    """
    if len(shape) != 2 or len(scales) != 2 or not sizes:
        return tuple(shape)
    return tuple(
        count * of if 1 < count == -(-size // of) else size
        for size, count, of in zip(shape, scales, sizes, strict=True)
    )


def has_smaller(sources: Sequence[tuple[str, TensorSlice]], sizes: Sequence[int]) -> bool:
    """Tell whether any matrix among ``sources`` has a last block that is smaller than its others."""
    groups: dict[str, list[TensorSlice]] = {}
    for pattern, source in sources:
        groups.setdefault(pattern, []).append(source)
    return bool(sizes) and any(
        whole_sizes(one.shape, scale.shape, sizes) != tuple(one.shape)
        for pattern, matrices in groups.items()
        for one, scale in zip(matrices, groups.get(pattern + _OF_SCALES, ()), strict=False)
    )


def convert(operation: Any, collected: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the results of an operation of transformers on padded matrices, without the padding.

    ``collected`` has the operation's inputs, by the patterns that match the names of the inputs.
    """
    sizes = sizes_of(operation)
    if not sizes:
        return dict(operation.convert(collected, **more))
    made = operation.convert(_in_whole_blocks(collected, sizes), **more)
    # The operation renames the only matrix of a Linear to its name in the model.
    return {
        key: _cut_off(values, collected.get(key, collected.get("weight", [])))
        for key, values in made.items()
    }


def _in_whole_blocks(
    collected: Mapping[str, list[torch.Tensor]], sizes: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    made = dict(collected)
    for pattern, matrices in collected.items():
        if scales := collected.get(pattern + _OF_SCALES):
            pairs = zip(matrices, scales, strict=True)
            made[pattern] = [
                _filled_up(one, whole_sizes(one.shape, scale.shape, sizes)) for one, scale in pairs
            ]
    return made


def _filled_up(codes: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    if sizes == tuple(codes.shape):
        return codes
    whole = torch.zeros(sizes, dtype=torch.uint8).view(codes.dtype)
    whole[: codes.shape[0], : codes.shape[1]] = codes
    return whole


def _cut_off(values: Any, codes: Sequence[torch.Tensor]) -> Any:
    if isinstance(values, list):
        return [_cut_off(one, [code]) for one, code in zip(values, codes, strict=True)]
    if codes[0].dtype is torch.int8:
        return values  # each byte holds two codes
    return values[..., : codes[0].shape[-2], : codes[0].shape[-1]]
