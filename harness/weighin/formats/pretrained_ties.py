"""Find tensors that a class of transformers ties, but that differ in the file.

``from_pretrained`` ties an output head to the embedding only if the file does not hold both with
different values. This module uses only the standard library.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice

_PIECE_BYTES: Final = 4 * 1024**2
_TIES: Final = "tie_word_embeddings"


def kept_apart(config: Mapping[str, Any], slices: Sequence[TensorSlice]) -> tuple[str, ...]:
    """Return the sorted names of tensors in the file that differ, although a class may tie them.

    These are tensors with a row for each token of the vocabulary, of equal shape. The result is
    empty if ``config.json`` ties nothing. Equal tensors are read whole, others to the first difference.

    Raises:
        CheckpointError: the file cannot be read.
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    if not any(part.get(_TIES, True) for part in parts):
        return ()
    sizes = {
        value
        for part in parts
        for key, value in part.items()
        if "vocab_size" in key and isinstance(value, int)
    }
    apart: set[str] = set()
    rows = [one for one in slices if one.shape and one.shape[0] in sizes]
    for one, other in combinations(rows, 2):
        if one.shape == other.shape and not _are_equal(one, other):
            apart |= {one.name, other.name}
    return tuple(sorted(apart))


def _are_equal(one: TensorSlice, other: TensorSlice) -> bool:
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
        raise CheckpointError(
            f"{where.file}: cannot be read: {error.strerror}", "check the disk"
        ) from error
