"""Find tensors that a class of transformers ties, but that differ in the file.

``from_pretrained`` ties an output head to the embedding only if the file does not hold both with
different values. This module uses only the standard library.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from weighin.formats.base import TensorSlice
from weighin.formats.equal_tensors import are_equal

_TIES: Final = "tie_word_embeddings"


def kept_apart(config: Mapping[str, Any], slices: Sequence[TensorSlice]) -> tuple[str, ...]:
    """Return the sorted names of tensors in the file that differ, although a class may tie them.

    Such names are of tensors with a row for each token of the vocabulary, of equal shape. The
    result is empty if ``config.json`` ties nothing. Equal tensors are read whole, others to the
    first difference.

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
        if one.shape == other.shape and not are_equal(one, other):
            apart |= {one.name, other.name}
    return tuple(sorted(apart))
