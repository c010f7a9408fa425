"""List the dtypes that a checkpoint can contain, and the largest sizes.

This module uses only the standard library.
"""

from typing import Final

from weighin.formats.item_bytes import ITEM_BYTES

__all__ = ("ITEM_BYTES", "LARGEST", "MOST_DIMENSIONS", "is_sizes")

LARGEST: Final = 2**63 - 1
"""The largest size or offset that torch can represent."""

MOST_DIMENSIONS: Final = 64


def is_sizes(value: object) -> bool:
    """Tell whether a value is a list or tuple of sizes that torch can represent."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size <= LARGEST for size in value)
    )
