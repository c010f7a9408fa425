"""Memory that lies as its file does: who shares it, and that each tensor still is its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from weighin.loader import direct_io, fill
from weighin.loader.direct_io import DiskReaders
from weighin.loader.fill import READ_BYTES, being_filled
from weighin.loader.memory import (
    HUGE_PAGE_BYTES,
    MOST_BETWEEN_BYTES,
    TENSOR_ALIGNMENT,
    Area,
    Fill,
    MemoryNeed,
    Piece,
    provide,
)
from weighin.probes import page_cache
from weighin.probes.process import memory_of, read_status
from weighin.stream import formats
from weighin.stream.slices import TensorSlice
from weighin.units import MIB

CPU = torch.device("cpu")


def place(
    name: str, mib: float, offset: int, dtype: str = "float32", file: str = "f"
) -> TensorSlice:
    numel = int(mib * MIB) // getattr(torch, dtype).itemsize
    size = numel * getattr(torch, dtype).itemsize
    return TensorSlice(name, (numel,), (1,), dtype, Path(file), offset, offset, size)


def needs(slices: Sequence[TensorSlice], dtype: torch.dtype | None = None) -> list[MemoryNeed]:
    return [
        MemoryNeed(one, torch.empty(one.shape, dtype=one.dtype), dtype or one.dtype, CPU)
        for one in slices
    ]


def together(given: Sequence[MemoryNeed]) -> list[str]:
    """Return the names of the tensors that are filled together."""
    names = {}
    found = list(provide(given))
    for need in given:
        names[need.tensor.data_ptr(), need.tensor.numel()] = need.source.name
    return [
        "".join(names[member.data_ptr(), member.numel()] for member in one.members) for one in found
    ]


def test_neighbours_lie_in_memory_as_in_their_file() -> None:
    slices = [
        place("a", 3, 4096 + 72),
        place("b", 1, 4096 + 72 + 3 * MIB + 128, "int64"),
        place("c", 4, 4096 + 72 + 4 * MIB + 192, "bfloat16"),
    ]
    given = needs(slices)
    (_found,) = provide(given)
    base = given[0].tensor.data_ptr()
    assert base % HUGE_PAGE_BYTES == 64
    for need in given:
        tensor, one = need.tensor, need.source
        assert tensor.data_ptr() - base == one.offset - slices[0].offset
        assert tensor.data_ptr() % TENSOR_ALIGNMENT == 0
        assert tensor.dtype == one.dtype
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == one.nbytes


def test_what_lies_apart_or_is_converted_shares_no_memory() -> None:
    gap = MOST_BETWEEN_BYTES + 64
    end = [0]

    def after(name: str, mib: float, between: int = 0, **kind: str) -> TensorSlice:
        one = place(name, mib, end[0] + between, **kind)
        end[0] = one.offset + one.nbytes
        return one

    slices = [
        after("a", 2), after("b", 2, gap - 64), after("c", 2, gap), after("d", 2),
        after("e", 2, 2), after("f", 2, 2),  # e begins between two elements
        after("g", 2, 8), after("h", 2, 64),  # g would not begin where torch lets tensors begin
        place("i", 2, end[0], file="g"), place("j", 2, end[0] + 2 * MIB, file="g"),
    ]  # fmt: skip
    assert together(needs(slices)) == ["ab", "cd", "e", "f", "gh", "ij"]
    assert together(needs(slices, torch.float32))[0] == "ab"
    assert together(needs(slices, torch.bfloat16)) == list("abcdefghij")


def test_small_tensors_have_memory_of_their_own() -> None:
    found = list(provide(needs([place("a", 1, 0), place("b", 0.5, MIB)])))
    assert [one.neighbours for one in found] == [(), ()]


def test_nothing_lies_nowhere() -> None:
    given = needs([place("a", 2, 0), place("n", 0, 2 * MIB), place("b", 2, 2 * MIB)])
    assert [len(one.members) for one in provide(given)] == [1, 1, 1]


@pytest.mark.usefixtures("no_garbage")
def test_a_tensor_gives_its_memory_back_and_leaves_the_others_theirs() -> None:
    area = Area(96 * MIB + 8, 8)
    area.whole.fill_(1)
    tensors = [area.tensor(at * MIB, 32 * MIB, torch.uint8) for at in (0, 32, 64)]
    del area
    before = memory_of(read_status()).anon_bytes
    del tensors[1]
    now = memory_of(read_status()).anon_bytes
    assert before - now == pytest.approx(32 * MIB, abs=MIB)
    assert all(int(one.sum()) == 32 * MIB for one in tensors)
    tensors.clear()
    assert before - memory_of(read_status()).anon_bytes == pytest.approx(96 * MIB, abs=MIB)


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
def test_neighbours_are_right_however_their_reads_are_cut(
    cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of 8 MiB are copied at once, and what is small of the rest is read."""
    monkeypatch.setattr(fill, "COPIED_BYTES", 8 * MIB)
    monkeypatch.setattr(direct_io, "COPIED_BYTES", 8 * MIB)
    torch.manual_seed(0)
    sizes = [5 * MIB, 3, 9 * MIB + 1, 1000, 4 * MIB]  # bytes / 4
    state = {f"t{number}": torch.randn(size // 4 + 1) for number, size in enumerate(sizes)}
    state["last"] = torch.arange(30 * MIB, dtype=torch.int64)[:: MIB // 8].contiguous()
    torch.save(state, tmp_path / "some.pt")
    if cold:
        assert page_cache.drop([tmp_path / "some.pt"]) == 0
    slices = formats.read(tmp_path / "some.pt")
    given = needs(slices)
    found = list(provide(given))
    assert any(one.neighbours for one in found)
    with being_filled(found, DiskReaders(2)):
        pass
    for need in given:
        assert torch.equal(need.tensor, state[need.source.name]), need.source.name


@pytest.mark.parametrize(
    ("mib", "threads", "shares"), [(191, 1, 0), (400, 1, 2), (400, 2, 2), (800, 2, 4), (800, 3, 3)]
)
def test_what_is_cached_is_copied_in_equal_shares_of_all_threads(
    mib: int, threads: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "copies_by_mapping", lambda: True)
    where = place("a", mib, 0)
    one = Fill(where, torch.empty(mib * MIB // 4))
    sizes = [piece.target.nbytes for piece in fill.copies([one], threads)]
    assert sum(sizes) == mib * MIB
    if shares:
        assert len(sizes) in (shares, shares + 1)  # memory that begins within a huge page
        assert min(sizes[:shares]) >= mib * MIB // shares - shares * HUGE_PAGE_BYTES
    else:
        assert max(sizes) <= READ_BYTES


def test_what_this_processor_reads_faster_than_it_copies_is_read_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fill, "copies_by_mapping", lambda: False)
    one = Fill(place("a", 400, 0), torch.empty(400 * MIB // 4))
    assert max(piece.target.nbytes for piece in fill.copies([one], 2)) <= READ_BYTES


def test_what_is_converted_is_not_copied_at_once() -> None:
    one = Fill(place("a", 800, 0), torch.empty(200 * MIB, dtype=torch.bfloat16))
    pieces: list[Piece] = list(fill.copies([one], 2))
    assert max(piece.target.nbytes for piece in pieces) <= READ_BYTES
