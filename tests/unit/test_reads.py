"""Which neighbours in a file are read together, and what a buffer's worth of them becomes."""

import mmap
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from weighin.loader.direct_io import PieceReader
from weighin.loader.memory import Piece
from weighin.loader.reads import PieceFiller, Runs
from weighin.probes import page_cache
from weighin.stream.slices import TensorSlice

MOST_BYTES = 4096
MOST_CONVERTED_BYTES = 2048


def piece(offset: int, numel: int, target: str = "float32", file: str = "a") -> Piece:
    dtype = getattr(torch, target)
    where = TensorSlice("w", (numel,), (1,), "float32", Path(file), offset, offset, 4 * numel)
    return Piece(where, offset, torch.empty(numel, dtype=dtype))


def lengths(pieces: Iterable[Piece], most_bytes: int = MOST_BYTES) -> list[int]:
    runs = Runs(pieces, most_bytes)
    return [len(run) for run in iter(lambda: runs.take(MOST_CONVERTED_BYTES), [])]


def test_neighbours_up_to_a_size_together() -> None:
    assert lengths([piece(0, 500), piece(2000, 5), piece(2020, 519)]) == [3]
    assert lengths([piece(0, 500), piece(2000, 5), piece(2020, 520)]) == [2, 1]


def test_what_nobody_asked_for_between_them_is_read_only_while_it_is_little() -> None:
    close, far = 40 + 64 * 1024, 44 + 64 * 1024
    assert lengths([piece(0, 10), piece(close, 10)], 2**20) == [2]
    assert lengths([piece(0, 10), piece(far, 10)], 2**20) == [1, 1]


def test_not_back_nor_from_another_file() -> None:
    assert lengths([piece(400, 10), piece(0, 10)]) == [1, 1]
    assert lengths([piece(0, 10), piece(40, 10, file="b")]) == [1, 1]


def test_what_is_converted_is_not_read_with_what_is_not() -> None:
    half = piece(40, 10, "bfloat16")
    assert lengths([piece(0, 10), half, piece(80, 10)]) == [1, 1, 1]


def test_what_is_converted_is_read_together_up_to_the_buffer_of_whoever_takes_it() -> None:
    halves = [piece(400 * at, 100, "bfloat16") for at in range(12)]
    assert lengths(halves) == [5, 5, 2]
    runs = Runs(halves, MOST_BYTES)
    assert [len(runs.take(most)) for most in (800, 399, 10_000, 10_000)] == [2, 1, 9, 0]


def test_a_buffer_begins_where_the_largest_number_would() -> None:
    """From byte 4 a run of 2,048 bytes would read 2,052."""
    assert lengths([piece(0, 256, "bfloat16"), piece(1024, 256, "bfloat16")]) == [2]
    assert lengths([piece(4, 256, "bfloat16"), piece(1028, 256, "bfloat16")]) == [1, 1]


def test_numbers_that_lie_odd_are_read_alone() -> None:
    assert lengths([piece(0, 10, "bfloat16"), piece(42, 10, "bfloat16")]) == [1, 1]


def test_no_more_than_one_call_takes() -> None:
    assert lengths(piece(4 * at, 1) for at in range(600)) == [80] * 7 + [40]


KINDS = ("float32", "float64", "uint8", "int16", "float16", "float64")
NUMBERS = 1000


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("first", [4096, 4100])
def test_neighbours_of_all_widths_are_converted_out_of_one_buffer(
    first: int, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, offset, pieces, wanted = tmp_path / "numbers", first, [], []
    content = bytearray(first)
    for name in KINDS:
        dtype = getattr(torch, name)
        size = NUMBERS * dtype.itemsize
        gap = -offset % dtype.itemsize
        values = (torch.arange(NUMBERS) % 100).to(dtype)
        content += bytes(gap) + bytes(values.view(torch.uint8).numpy())
        offset += gap
        where = TensorSlice("w", (NUMBERS,), (1,), name, file, offset, offset, size)
        pieces.append(Piece(where, offset, torch.zeros(NUMBERS, dtype=torch.bfloat16)))
        wanted.append(values.to(torch.bfloat16))
        offset += size
    file.write_bytes(content)
    monkeypatch.setattr(page_cache, "cached_share", lambda *_: float(cached))
    reads = []
    read_piece = PieceReader.piece

    def noting(self: PieceReader, path: Path, start: int, size: int) -> memoryview:
        reads.append(start)
        return read_piece(self, path, start, size)

    monkeypatch.setattr(PieceReader, "piece", noting)
    with PieceFiller(memoryview(mmap.mmap(-1, 2**18))) as filler:
        run = Runs(pieces, MOST_BYTES).take(filler.most_converted_bytes)
        assert len(run) == len(KINDS)
        filler.fill(run)
    assert reads == ([] if cached else [4096])
    for found, right in zip(pieces, wanted, strict=True):
        assert torch.equal(found.target, right)
