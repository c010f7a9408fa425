"""Elements that are read where narrower ones will lie become those, and disturb no neighbour."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from weighin.loader import reads as reading
from weighin.loader.direct_io import PieceReader
from weighin.loader.memory import allocate
from weighin.loader.open_file import ALIGNMENT
from weighin.loader.reads import read_shrinking, shrinks
from weighin.probes import page_cache
from weighin.stream.slices import TensorSlice

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float16),
]


def where(file: Path, values: torch.Tensor, offset: int) -> TensorSlice:
    """Write the values at an offset of a file, with other bytes around them."""
    file.write_bytes(b"\xff" * offset + values.numpy().tobytes() + b"\xff" * 100)
    name = str(values.dtype).removeprefix("torch.")
    return TensorSlice("w", tuple(values.shape), (1,), name, file, offset, offset, values.nbytes)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few pages have what a few MiB have otherwise: every kind of step."""
    monkeypatch.setattr(reading, "_LEAST_BYTES", 2 * ALIGNMENT)
    monkeypatch.setattr(reading, "_FIRST_ELEMENTS", 8)
    monkeypatch.setattr(reading, "_MOST_ELEMENTS", 256)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
@given(
    numel=st.integers(1, 40_000),
    skip=st.integers(0, 5_000),
    ahead=st.integers(0, 5_000),
    cold=st.booleans(),
)
def test_what_is_read_in_place_becomes_the_narrow_values(
    tmp_path_factory: pytest.TempPathFactory,
    wide: torch.dtype,
    narrow: torch.dtype,
    numel: int,
    skip: int,
    ahead: int,
    cold: bool,
) -> None:
    file = tmp_path_factory.mktemp("shrinking") / "file"
    values = torch.randn(numel, dtype=wide, generator=torch.Generator().manual_seed(numel))
    source = where(file, values, skip * wide.itemsize)
    if cold:
        page_cache.drop([file])
    around = torch.full((ahead + numel + 1_000,), 7, dtype=narrow)
    target = around[ahead : ahead + numel]
    reader = PieceReader()
    done = read_shrinking(reader, source, source.offset, target)
    reader.close()
    assert torch.equal(target[:done], values[:done].to(narrow))
    assert (numel - done) * narrow.itemsize < 2 * ALIGNMENT
    assert (around[:ahead] == 7).all()
    assert (around[ahead + numel :] == 7).all()


def test_all_reads_but_the_first_one_s_head_are_whole_pages_where_they_lie(
    tmp_path: Path,
) -> None:
    """Then the disk writes there by itself; with no more than the model's memory."""
    values = torch.randn(12 * 1024**2)
    source = where(tmp_path / "file", values, 1000)
    target = allocate(len(values), torch.bfloat16, torch.device("cpu"))  # where a page begins
    reads = []

    class Watched(PieceReader):
        def read(self, file: Path, target: memoryview, offset: int) -> None:
            reads.append((offset, len(target)))
            super().read(file, target, offset)

        def piece(self, file: Path, offset: int, size: int) -> memoryview:
            raise AssertionError("a buffer was used")

    reader = Watched()
    done = read_shrinking(reader, source, source.offset, target)
    reader.close()
    assert torch.equal(target[:done], values[:done].bfloat16())
    assert reads[0][0] == 1000
    assert all(offset % ALIGNMENT == 0 for offset, _ in reads[1:])
    assert all((offset + size) % ALIGNMENT == 0 for offset, size in reads)
    assert [size // 1024**2 for _, size in reads] == [23, 12, 6, 3, 1]
    assert target[done:].nbytes < 1024**2


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("float32", torch.empty(9, dtype=torch.bfloat16), True),
        ("float32", torch.empty(9, dtype=torch.float32), False),
        ("float16", torch.empty(9, dtype=torch.float32), False),
        ("float32", torch.empty(9, 9, dtype=torch.bfloat16).t()[:3], False),
        ("float32", torch.empty(9, 9, dtype=torch.bfloat16)[3:], True),
    ],
)
def test_only_what_becomes_narrower_and_lies_in_order_is_converted_in_place(
    source: str, target: torch.Tensor, told: bool
) -> None:
    shape, stride = tuple(target.shape), tuple(target.stride())
    one = TensorSlice("w", shape, stride, source, Path("f"), 64, 64, 4 * target.numel())
    assert shrinks(one, target) is told
