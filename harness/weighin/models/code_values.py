"""Compute weights from the codes and scales of bitsandbytes, GPTQ and AWQ, with operations of torch alone.

The functions return weights and scales in float32, and the caller rounds the weights to the wanted
dtype. The rounded weights equal those of bitsandbytes and of gptqmodel.
"""

import torch

_WORD: int = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ packs 8 columns into a 32-bit word: for each column, the index of its 4 bits in the word."""

_OF_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes rounds it


def int8_rows(codes: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the values of int8 codes of bitsandbytes; ``largest`` has the largest magnitude of each row."""
    return codes * largest.view(-1, 1) * _OF_INT8


def four_bits(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int
) -> torch.Tensor:
    """Return the values of nf4 or fp4 codes of bitsandbytes as a flat tensor: two from each byte.

    ``scales`` has one number for each block of ``block`` values; the last block may be smaller.
    """
    pairs = torch.cartesian_prod(table, table)  # the high half of a byte comes first
    values = pairs.index_select(0, codes.reshape(-1).int()).view(-1)
    return values.mul_(scales.repeat_interleave(block)[: len(values)])


def nested_scales(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int, offset: float
) -> torch.Tensor:
    """Dequantise scales that bitsandbytes quantised to 8 bits (double quantisation)."""
    values = table.index_select(0, codes.reshape(-1).int())
    return values.mul_(scales.repeat_interleave(block)[: len(values)]).add_(offset)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack integers of ``bits`` bits from the 32-bit words of each column, the lowest bits first.

    3 words hold 32 integers of 3 bits; two of these integers begin in one word and end in the next.
    """
    mask = (1 << bits) - 1
    if _WORD % bits == 0:
        shifts = torch.arange(0, _WORD, bits, dtype=torch.int32).view(1, -1, 1)
        return ((words[:, None] >> shifts) & mask).flatten(0, 1)
    several = (words.long() & 0xFFFFFFFF).view(-1, bits, words.shape[1])
    values = []
    for start in range(0, _WORD * bits, bits):
        number, shift = divmod(start, _WORD)
        after = several[:, min(number + 1, bits - 1)] << (_WORD - shift)
        values.append((several[:, number] >> shift | after) & mask)
    return torch.stack(values, 1).flatten(0, 1).int()


def gptq(
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    bits: int,
    stored_less: int,
) -> torch.Tensor:
    """Return a layer's weights from codes of GPTQ, one row for each input of the layer.

    Args:
        groups: for each input of the layer, its row number in ``zeros`` and ``scales``.
        stored_less: the number to add to the zero points of the file: 1 for the first version of
            GPTQ's format, else 0.
    """
    outputs = scales.shape[1]
    of_groups = unpacked(zeros.t(), bits).t()[:, :outputs]
    of_groups = (of_groups + stored_less) & ((1 << bits) - 1)
    return _scaled(unpacked(words, bits)[: len(groups)], of_groups, scales, groups)


def awq(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Return a layer's weights from codes in AWQ's layout "gemm", one row for each input."""
    return _scaled(_awq_columns(words), _awq_columns(zeros), scales, groups)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor(_AWQ_ORDER, dtype=torch.int32) * 4
    return ((words[..., None] >> shifts) & 15).flatten(1)


def _scaled(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    codes = codes.sub_(zeros.contiguous().index_select(0, groups))
    return scales.float().index_select(0, groups).mul_(codes)
