"""Memory that lends itself as buffers: whose it is, how much, and that the load stays right."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from weighin.loader import fill
from weighin.loader.fill import LENT_BYTES, READ_BYTES, Lent, buffer_in, lend
from weighin.loader.load import load_streaming
from weighin.loader.memory import Fill, Piece, allocate, memory_of
from weighin.loader.open_file import ALIGNMENT
from weighin.probes import page_cache
from weighin.stream import formats
from weighin.stream.slices import TensorSlice

MIB = 1024**2
SIZES = {"a": 3 * MIB, "b": 40 * MIB, "c": 5 * MIB, "d": 4096, "e": 7 * MIB}  # bytes in float32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    state = {name: torch.randn(size // 4) for name, size in SIZES.items()}
    path = tmp_path_factory.mktemp("lending") / "model.pt"
    torch.save(state, path)
    return path, state


def fills(path: Path, dtype: torch.dtype | None) -> dict[str, Fill]:
    """Large ones begin where a huge page does: into how many parts they are cut depends on it."""
    return {
        one.name: Fill(one, allocate(one.shape[0], dtype or one.dtype, CPU))
        for one in formats.read(path)
    }


def names(pieces: Iterable[Piece]) -> list[str]:
    return [one.source.name for one in pieces]


def test_the_largest_lend_half_of_what_is_converted_as_evenly_as_there_are_threads(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    all_ = fills(saved[0], torch.bfloat16)  # 27.5 MiB
    lent = lend(list(all_.values()), READ_BYTES, threads=3)
    assert [one.target.nbytes for one in lent.lenders] == [4 * MIB, 4 * MIB, 4 * MIB]
    assert names(lent.lenders) == ["b", "b", "b"]
    borrowers = list(lent.borrowers)
    assert list(dict.fromkeys(names(borrowers))) == ["a", "b", "c", "d", "e"]
    assert max(one.target.nbytes for one in borrowers) == 2 * MIB  # to be put together again
    whole = sum(one.memory.nbytes for one in all_.values())
    assert sum(one.target.nbytes for one in (*lent.lenders, *borrowers)) == whole
    for lender in lent.lenders:
        buffer = buffer_in(lender)
        at = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        assert at % ALIGNMENT == 0
        assert lender.target.data_ptr() <= at
        assert at + len(buffer) == lender.target.data_ptr() + lender.target.nbytes


def test_parts_of_several_tensors_are_read_in_the_files_order() -> None:
    """Experts of a mixture, joined to two tensors: one read covers neighbours of both tensors."""
    size = 4 * MIB

    def joined(name: str, places: Sequence[int]) -> Fill:
        parts = tuple(
            TensorSlice("", (1, size), (size, 1), "uint8", Path("a"), at, at, size, (), (number, 0))
            for number, at in enumerate(places)
        )
        shape = (len(places), size)
        first = places[0]
        whole = TensorSlice(
            name, shape, (size, 1), "uint8", Path("a"), first, first, 2 * size, parts=parts
        )
        return Fill(whole, torch.empty(shape, dtype=torch.uint8))

    fills = [joined("up", [3 * size, size]), joined("down", [0, 2 * size])]
    borrowers = list(lend(fills, READ_BYTES, threads=2).borrowers)
    assert [one.offset for one in borrowers] == sorted(one.offset for one in borrowers)
    assert sum(one.target.nbytes for one in borrowers) == 4 * size


def test_none_lends_more_than_a_disk_wants_at_once() -> None:
    count = 64 * MIB
    place = TensorSlice("a", (count,), (1,), "float32", Path("model.pt"), 0, 0, 4 * count)
    one = Fill(place, torch.empty(count, dtype=torch.bfloat16))
    lent = lend([one], READ_BYTES, threads=2)
    lengths = {piece.target.nbytes for piece in lent.lenders}
    assert len(lent.lenders) == 2
    assert max(lengths) == LENT_BYTES


@pytest.mark.parametrize(
    ("dtype", "names_"),
    [(None, "abcde"), (torch.bfloat16, "a")],
    ids=["nothing is converted", "too small"],
)
def test_nobody_lends_where(
    saved: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype | None, names_: str
) -> None:
    given = [one for name, one in fills(saved[0], dtype).items() if name in names_]
    lent = lend(given, READ_BYTES, threads=3)
    assert lent.lenders == ()
    read: dict[str, tuple[int, int]] = {}  # in how many parts depends on where the memory lies
    for piece in lent.borrowers:
        start, end = read.get(piece.source.name, (piece.offset, piece.offset))
        assert piece.offset == end
        read[piece.source.name] = start, piece.end
    assert read == {
        one.source.name: (one.source.offset, one.source.offset + one.source_bytes) for one in given
    }


class Five(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size // 4)))


@pytest.mark.usefixtures("disk_in_time")
@pytest.mark.parametrize(
    ("dtype", "threads", "lending"),
    [
        (torch.bfloat16, 1, 1),
        (torch.bfloat16, 3, 3),
        (torch.bfloat16, None, 6),
        (torch.float64, 3, 3),
        (torch.float64, None, 16),
    ],
)
def test_what_was_read_by_way_of_lent_memory_is_right_and_so_is_the_lender(
    saved: tuple[Path, dict[str, torch.Tensor]],
    dtype: torch.dtype,
    threads: int | None,
    lending: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lenders: list[int] = []

    def noting(given: Sequence[Fill], most_bytes: int, count: int) -> Lent:
        lent = lend(given, most_bytes, count)
        lenders.append(len(lent.lenders))
        for one in lent.lenders:
            memory_of(one.target)[:] = b"\xff" * one.target.nbytes
        return lent

    monkeypatch.setattr(fill, "lend", noting)
    path, state = saved
    assert page_cache.drop([path]) == 0
    with torch.device("meta"):
        model = Five()
    load_streaming(model, path, dtype=dtype, threads=threads)
    assert lenders == [lending]
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name], tensor.to(dtype)), name


def test_torch_has_its_threads_again_after_a_load(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    before = torch.get_num_threads()
    with torch.device("meta"):
        model = Five()
    load_streaming(model, saved[0], dtype=torch.bfloat16)
    assert torch.get_num_threads() == before
