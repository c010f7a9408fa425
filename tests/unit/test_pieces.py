"""Which neighbours in a file are read together."""

from collections.abc import Iterable
from pathlib import Path

import torch

from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.pieces import Piece, in_runs

MOST_BYTES = 4096


def piece(offset: int, numel: int, target: str = "float32", file: str = "a") -> Piece:
    dtype = getattr(torch, target)
    where = TensorSlice("w", (numel,), (1,), "float32", Path(file), offset, offset, 4 * numel)
    return Piece(where, offset, torch.empty(numel, dtype=dtype))


def lengths(pieces: Iterable[Piece]) -> list[int]:
    return [len(run) for run in in_runs(pieces, MOST_BYTES)]


def test_neighbours_up_to_a_size_together() -> None:
    assert lengths([piece(0, 500), piece(2000, 5), piece(2020, 519)]) == [3]
    assert lengths([piece(0, 500), piece(2000, 5), piece(2020, 520)]) == [2, 1]


def test_what_nobody_asked_for_between_them_is_read_only_while_it_is_little() -> None:
    close, far = 40 + 64 * 1024, 44 + 64 * 1024
    assert [len(run) for run in in_runs([piece(0, 10), piece(close, 10)], 2**20)] == [2]
    assert [len(run) for run in in_runs([piece(0, 10), piece(far, 10)], 2**20)] == [1, 1]


def test_not_back_nor_from_another_file() -> None:
    assert lengths([piece(400, 10), piece(0, 10)]) == [1, 1]
    assert lengths([piece(0, 10), piece(40, 10, file="b")]) == [1, 1]


def test_what_is_converted_is_read_alone() -> None:
    half = piece(40, 10, "bfloat16")
    assert lengths([piece(0, 10), half, piece(80, 10)]) == [1, 1, 1]


def test_no_more_than_one_call_takes() -> None:
    assert lengths(piece(4 * at, 1) for at in range(600)) == [256, 256, 88]
