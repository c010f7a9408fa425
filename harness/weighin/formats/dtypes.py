"""List the dtypes that a checkpoint can contain, and the largest size that torch can represent."""

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

ITEM_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""The size of one element in bytes, for each dtype that weighin reads, writes and verifies."""

LARGEST: Final = 2**63 - 1
"""The largest size or offset that torch can represent."""

MOST_DIMENSIONS: Final = 64

NOT_CONVERTED: Final = frozenset({"float4_e2m1fn_x2"})
"""Dtypes whose tensors torch can store, but cannot copy or convert."""

QUANTISED_BYTES: Final = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
"""The size of one stored element in bytes, for torch's quantised dtypes; weighin does not read them."""

_DTYPE: Final = re.compile(r"(q?u?int|bits|b?float|complex)\d\w{,30}|bool")


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name of a dtype without "torch.": "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_dtype(name: str) -> bool:
    """Tell whether ``name`` is a dtype of torch, in this version of torch or another one."""
    return _DTYPE.fullmatch(name) is not None


def is_sizes(value: object) -> bool:
    """Tell whether a value is a list or tuple of sizes that torch can represent."""
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMENSIONS:
        return False
    return not [size for size in value if type(size) is not int or not 0 <= size <= LARGEST]
