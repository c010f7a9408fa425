"""Compare the bytes of two tensors in files."""

from collections.abc import Iterator
from typing import Final

from weighin.formats.base import TensorSlice
from weighin.formats.unknown_file import unreadable

_PIECE_BYTES: Final = 4 * 1024**2


def are_equal(one: TensorSlice, other: TensorSlice) -> bool:
    """Tell whether two tensors of the same shape have the same dtype and the same bytes.

    The function reads both tensors up to the first difference.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if (one.file, one.offset) == (other.file, other.offset):
        return one.stride == other.stride
    if one.dtype_name != other.dtype_name or one.nbytes != other.nbytes:
        return False
    return all(a == b for a, b in zip(_pieces(one), _pieces(other), strict=True))


def _pieces(where: TensorSlice) -> Iterator[bytes]:
    try:
        with where.file.open("rb") as file:
            file.seek(where.offset)
            for start in range(0, where.nbytes, _PIECE_BYTES):
                yield file.read(min(_PIECE_BYTES, where.nbytes - start))
    except OSError as error:
        raise unreadable(where.file, error) from error
