"""The dtypes that a file can hold, by torch's names. Standard library only."""

from typing import Final

ITEM_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}  # fmt: skip
"""The bytes of one element."""

LARGEST: Final = 2**63 - 1
"""The largest size and offset that torch can count."""

MOST_DIMENSIONS: Final = 64


def is_sizes(value: object) -> bool:
    """Tell whether a value is a list or tuple of sizes that torch can count."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size <= LARGEST for size in value)
    )
