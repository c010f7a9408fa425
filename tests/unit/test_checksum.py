"""The checksum sees every change, and nothing but the bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin.checkpoint.checksum import (
    PIECE_ELEMENTS,
    RunningChecksum,
    checksum,
    pieces_of,
    summing,
)

LANES = 65_521


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50)
@given(st.integers(1, 300_000), st.data())
def test_one_changed_element_changes_it(numel: int, data: st.DataObject) -> None:
    tensor = numbers(numel)
    before = checksum(tensor)
    at = data.draw(st.integers(0, numel - 1))
    tensor[at] += 1
    assert checksum(tensor) != before
    tensor[at] -= 1


@pytest.mark.parametrize("rows", [2, LANES, 2 * LANES])
def test_two_rows_that_changed_places_change_it(rows: int) -> None:
    tensor = numbers(rows, 4)
    swapped = tensor.clone()
    swapped[[0, rows - 1]] = tensor[[rows - 1, 0]]
    assert checksum(swapped) != checksum(tensor)


def test_chunks_that_changed_places_change_it() -> None:
    tensor = numbers(3, LANES * 16)
    assert checksum(tensor[[1, 0, 2]]) != checksum(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(7, 5).t(), numbers(1000, 2100).t(), numbers(3, 4, 5).transpose(0, 1), numbers(101)[1:],
        torch.tensor(3.5), torch.tensor(True), torch.tensor([True, False, True]),
    ],
    ids=["matrix", "large", "cube", "odd address", "scalar", "flag", "flags"],
)  # fmt: skip
def test_strides_and_alignment_do_not_matter(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone(memory_format=torch.contiguous_format))
    assert checksum(tensor) != checksum(torch.zeros_like(tensor))


def test_length_counts() -> None:
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.empty(0)) == checksum(torch.zeros(2, 0)) == "0" * 16


def test_a_known_value_so_that_manifests_stay_valid() -> None:
    assert checksum(torch.arange(1_000_000, dtype=torch.int64)) == "645f210637849032"


@pytest.mark.parametrize("numel", [0, 1, PIECE_ELEMENTS - 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 3])
def test_pieces_give_the_checksum_of_the_whole(numel: int) -> None:
    for tensor in (numbers(numel), torch.zeros(numel, dtype=torch.bool).fill_(True)):
        running = RunningChecksum(tensor.nbytes)
        for piece in pieces_of(tensor):
            running.update(piece)
        assert running.hexdigest() == checksum(tensor)


def sums_of(tensor: torch.Tensor) -> dict[str, str]:
    sums: dict[str, dict[str, str]] = {}
    for _ in summing("w", pieces_of(tensor), tensor.numel(), tensor.dtype, sums):
        pass
    return sums["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_floating_tensor_has_the_checksum_of_each_cell_dtype(dtype: torch.dtype) -> None:
    tensor = numbers(33, 7).to(dtype)
    sums = sums_of(tensor)
    assert set(sums) >= {"float32", "bfloat16", "float16"}
    for name, value in sums.items():
        assert value == checksum(tensor.to(getattr(torch, name)))
    assert sums_of(tensor.t()) == sums_of(tensor.t().contiguous())


def test_other_tensors_have_only_their_own() -> None:
    tensor = torch.arange(10)
    assert sums_of(tensor) == {"int64": checksum(tensor)}
    assert sums_of(torch.zeros(0, dtype=torch.bool)) == {"bool": "0" * 16}
