"""A tensor is the same, however its elements are spread over flat tensors."""

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError
from weighin.stream.slices import Slice
from weighin.stream.zero import boxes, laid_out

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.lists(st.integers(0, 700), max_size=4))
def test_boxes_of_all_ranges_are_the_whole_tensor_in_order(
    shape: tuple[int, ...], cuts: list[int]
) -> None:
    numbers = torch.arange(prod(shape)).reshape(shape)
    ends = sorted({0, prod(shape), *(cut for cut in cuts if cut < prod(shape))})
    found = []
    for first, last in pairwise(ends):
        of_range = list(boxes(shape, first, last))
        assert len(of_range) <= max(1, 2 * len(shape) - 1)
        for start, size in of_range:
            place = tuple(slice(at, at + count) for at, count in zip(start, size, strict=True))
            found.append(numbers[place].flatten())
    assert torch.equal(torch.cat(found), numbers.flatten())


def flat_file(path: Path, values: torch.Tensor) -> Slice:
    path.write_bytes(values.numpy().tobytes())
    return Slice("flat", tuple(values.shape), (1,), "float32", path, 0, 0, values.nbytes)


def test_elements_are_joined_from_several_files(tmp_path: Path) -> None:
    values = torch.randn(60)
    files = [
        flat_file(tmp_path / str(number), part)
        for number, part in enumerate(values.split([7, 0, 31, 22]))
    ]
    shapes = {"skipped": (5,), "one": (4, 3, 4), "none": (0, 3), "last": (7,)}
    found = laid_out(tmp_path / "states", shapes, [files])
    for name, start, end in (("skipped", 0, 5), ("one", 5, 53), ("last", 53, 60)):
        pieces = [piece.clone() for piece in read_pieces(found[name])]
        assert torch.equal(torch.cat(pieces), values[start:end])
    assert found["none"].nbytes == 0
    with pytest.raises(CheckpointError, match="have 60 of the 61 elements of 'more'"):
        laid_out(tmp_path / "states", {"more": (61,)}, [files])
    with pytest.raises(CheckpointError, match="have 60 elements, but the shapes in states need 59"):
        laid_out(tmp_path / "states", {"fewer": (59,)}, [files])
