"""Several targets that lie one behind the other in a file are filled by one read."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from weighin.errors import CheckpointError
from weighin.loader.direct_io import PieceReader, gather
from weighin.loader.open_file import ALIGNMENT
from weighin.probes import page_cache

SIZE = 2 * 1024**2 + 777
CONTENT = os.urandom(SIZE)
NOTHING = b"\xee"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gathering") / "file"
    path.write_bytes(CONTENT)
    return path


@dataclass(frozen=True)
class Place:
    """Where a target lies: in the file, how far behind a page's start in memory, and its size."""

    offset: int
    lead: int
    size: int


@st.composite
def places(draw: st.DrawFn) -> list[Place]:
    """Draw small and large neighbours, some of which lie in memory as in the file."""
    found: list[Place] = []
    at = draw(st.integers(0, 3 * ALIGNMENT))
    for _ in range(draw(st.integers(1, 9))):
        size = draw(st.integers(1, 100) | st.integers(1, 80 * ALIGNMENT))
        if at + size > SIZE:
            break
        found.append(Place(at, draw(st.sampled_from([at % ALIGNMENT, 0, 8])), size))
        at += size + draw(st.sampled_from([0, 0, 5, 2 * ALIGNMENT]))
    return found


class Targets:
    """Memory for each place, with room around it that must stay as it is."""

    def __init__(self, where: list[Place]) -> None:
        self.where = where
        self.areas = [mmap.mmap(-1, one.lead + one.size + ALIGNMENT) for one in where]
        for area in self.areas:
            area[:] = NOTHING * len(area)
        self.views = [
            memoryview(area)[one.lead : one.lead + one.size]
            for area, one in zip(self.areas, where, strict=True)
        ]

    @property
    def places(self) -> list[tuple[memoryview, int]]:
        return [(view, one.offset) for view, one in zip(self.views, self.where, strict=True)]

    def check(self) -> None:
        for area, one in zip(self.areas, self.where, strict=True):
            end = one.lead + one.size
            assert area[one.lead : end] == CONTENT[one.offset : one.offset + one.size]
            assert area[: one.lead] == NOTHING * one.lead
            assert area[end:] == NOTHING * (len(area) - end)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=places(), cold=st.booleans())
def test_every_target_gets_its_bytes_and_no_more(
    file: Path, where: list[Place], cold: bool
) -> None:
    if cold:
        page_cache.drop([file])
    targets, reader = Targets(where), PieceReader()
    reader.read_together(file, targets.places)
    reader.close()
    targets.check()


def test_neighbours_are_one_read(file: Path, monkeypatch: MonkeyPatch) -> None:
    """A small read of its own would wait for the large ones before it."""
    large = 100 * ALIGNMENT
    where = [
        Place(5000, 5000 % ALIGNMENT, large),
        Place(5000 + large, 0, 20),
        Place(5020 + large, 0, 700),
        Place(5720 + large, (5720 + large) % ALIGNMENT, large),
    ]
    reads: list[tuple[int, list[int]]] = []

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        reads.append((at, [len(buffer) // ALIGNMENT for buffer in buffers]))
        return os_preadv(descriptor, buffers, at)

    os_preadv = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    page_cache.drop([file])
    targets, reader = Targets(where), PieceReader()
    reader.read_together(file, targets.places)
    reader.close()
    targets.check()
    assert reads == [(ALIGNMENT, [1, 99, 1, 99, 1])]
    assert page_cache.cached([file]) == 0


def test_targets_that_lie_otherwise_in_memory_are_read_into_their_own_pages(file: Path) -> None:
    """A copy through the buffer would limit a read to the buffer's size."""
    large = 100 * ALIGNMENT
    targets = Targets([Place(40 + number * large, 64, large) for number in range(5)])
    gathered = gather(targets.places, memoryview(mmap.mmap(-1, 15 * ALIGNMENT)))
    assert gathered is not None
    assert sum(len(buffer) for buffer in gathered.buffers) == (5 * 100 + 1) * ALIGNMENT
    reader = PieceReader()
    page_cache.drop([file])
    reader.read_together(file, targets.places)
    reader.close()
    targets.check()


def test_what_needs_more_buffer_than_there_is_is_not_one_read() -> None:
    bounce = memoryview(mmap.mmap(-1, 4 * ALIGNMENT))
    aside = memoryview(mmap.mmap(-1, 5 * ALIGNMENT))[8:]
    assert gather([(aside[: 4 * ALIGNMENT - 8], 8)], bounce) is not None
    assert gather([(aside[: 4 * ALIGNMENT - 7], 8)], bounce) is None


def test_a_file_that_ends_among_the_targets_is_an_error(file: Path) -> None:
    targets = [(memoryview(bytearray(10)), SIZE - 10), (memoryview(bytearray(9)), SIZE)]
    reader = PieceReader()
    page_cache.drop([file])
    with pytest.raises(
        CheckpointError, match=rf"file: truncated: it ends before byte {SIZE + 9:,}\n"
    ):
        reader.read_together(file, targets)
    reader.close()
